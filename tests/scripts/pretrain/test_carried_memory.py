"""`dynattn pretrain` with memory that is carried from update to update along streams."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import set_seed
from cases.checkpoints import assert_same_weights, weights_of
from cases.training import call, curve, killed_after, losses, parse, write_corpus
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from dynattn import RCMHAConfig, RCMHAForCausalLM
from dynattn.modeling.caches.names import cache_in
from dynattn.modeling.ops.chunked_loss import IGNORED
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain import PretrainArguments, Result, pretrain
from dynattn.scripts.pretrain.carried_memory import StreamMemory, memory_tensors
from dynattn.scripts.pretrain.data.packing import StreamSegments
from dynattn.scripts.pretrain.data.token_stream import TokenStream
from dynattn.scripts.pretrain.optimizer import build_optimizer
from dynattn.scripts.pretrain.schedule import RateSchedule

STREAMS, SEGMENT = 4, 16
MODEL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "mem_len": 12,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
RUN: dict[str, Any] = {
    "model_type": "rcmha",
    "vocab_size": 300,
    "sequence_length": SEGMENT,
    "carry_memory": True,
    "mask_documents": False,
    "batch_size": STREAMS,
    "max_steps": 14,
    "warmup_steps": 2,
    "learning_rate": 1e-2,
    "validation_share": 0.2,
    "log_every": 1,
    "eval_every": 4,
    "save_every": 4,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of less than seven segments for each stream, so that the runs here begin it three times."""
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus.jsonl", longest=4)


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """A run with each type of memory."""
    folder = tmp_path_factory.mktemp("runs")
    return {name: run(folder / name, corpus, {"memory_type": name}) for name in ("streaming", "segment")}


def run(output: Path, corpus: Path, model: dict[str, Any] | None = None, **changes: Any) -> Result:
    settings = {"output": str(output), "dataset": str(corpus), "model_config": MODEL | (model or {}), **RUN}
    return pretrain(PretrainArguments(**(settings | changes)))


def killed_run(step: int, output: Path, corpus: Path, *args: Any, **changes: Any) -> None:
    with killed_after(step):
        run(output, corpus, *args, **changes)


def read_stream(result: Result, split: str) -> tuple[Tensor, Tensor]:
    """The tokens of a split, and what is to be predicted: all of them, but no start of a document."""
    folder = result.output / "data" / split
    tokens = torch.from_numpy(np.fromfile(folder / "tokens.bin", dtype=np.int32)).long()
    targets = tokens.clone()
    targets[torch.from_numpy(np.load(folder / "starts.npy"))] = IGNORED
    return tokens, targets


def fresh_model(result: Result) -> RCMHAForCausalLM:
    config = RCMHAForCausalLM.from_pretrained(result.model).config
    set_seed(0)
    return RCMHAForCausalLM(config)


def losses_by_hand(result: Result, *, carry: bool) -> list[float]:
    """The training of `result` as a plain loop over parts of the token stream."""
    model = fresh_model(result).train()
    arguments = PretrainArguments(output="x", max_steps=14, learning_rate=1e-2)
    optimizer, schedule = build_optimizer(model, arguments), RateSchedule(1e-2, 2, 14, 0.1)
    tokens, targets = read_stream(result, "train")
    length = (len(tokens) - 1) // STREAMS
    segments = math.ceil(length / SEGMENT)
    losses, memory = [], None
    for step in range(14):
        first = step % segments * SEGMENT
        last = min(first + SEGMENT, length)
        inputs = torch.stack([tokens[part * length :][first:last] for part in range(STREAMS)])
        wanted = torch.stack([targets[part * length + 1 :][first:last] for part in range(STREAMS)])
        output = model(inputs, past_key_values=memory if first and carry else None, use_cache=True)
        memory = output.past_key_values
        loss = F.cross_entropy(output.logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert length % SEGMENT > 0 and 2 * segments < 14
    return losses


@pytest.mark.parametrize("memory_type", ["streaming", "segment"])
def test_training_is_a_loop_over_streams_whose_memory_starts_anew_with_each_epoch(
    memory_type: str, finished: dict[str, Result]
) -> None:
    result = finished[memory_type]
    found, forgetful = losses(result.output, "train"), losses_by_hand(result, carry=False)
    assert found == pytest.approx(losses_by_hand(result, carry=True), rel=1e-4)
    assert found[0] == pytest.approx(forgetful[0], rel=1e-6)
    assert abs(found[1] - forgetful[1]) > 1e-3 * found[1]


@pytest.mark.parametrize(("on_bad_update", "bad"), [("skip", 5), ("rollback", 5), ("skip", 4)])
def test_a_bad_update_leaves_nothing_in_the_memory(
    on_bad_update: str, bad: int, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states that are not finite would make the next updates bad, too. Update 4 is saved when it was skipped."""
    seen: list[tuple[int, bool]] = []
    read = StreamMemory.loss

    def loss(self: StreamMemory, model: nn.Module, batch: dict[str, Tensor], micro_batch: int = 0) -> Tensor:
        if not model.training:
            return read(self, model, batch, micro_batch)
        seen.append((self.data_step, self.caches[micro_batch] is None))
        embeddings = model.get_input_embeddings().weight.data
        if poisoned := len(seen) == bad:
            embeddings += math.nan
        result = read(self, model, batch, micro_batch)
        if poisoned:
            embeddings.copy_(good)
        good.copy_(embeddings)
        return result

    def begin(self: StreamMemory, data_step: int) -> None:
        self.data_step = data_step
        begin_update(self, data_step)

    good, begin_update = torch.empty(320, 16), StreamMemory.begin_update
    monkeypatch.setattr(StreamMemory, "begin_update", begin)
    monkeypatch.setattr(StreamMemory, "loss", loss)
    result = run(tmp_path / "run", corpus, on_bad_update=on_bad_update, eval_every=100)
    assert curve(result.output, "loss", split="train").count([None]) == (on_bad_update == "skip")
    segments = next(step for step, _ in seen[1:] if step and seen[step][1] and step != bad)
    empty = [step for step, is_empty in seen if is_empty]
    begins = [step for step, _ in seen if step % segments == 0]
    assert empty == sorted({*begins, bad})


@pytest.mark.parametrize("memory_type", ["streaming", "segment"])
def test_validation_reads_one_stream_and_scores_every_token_once(memory_type: str, finished: dict[str, Result]) -> None:
    result = finished[memory_type]
    model = RCMHAForCausalLM.from_pretrained(result.model).eval()
    tokens, targets = read_stream(result, "validation")
    assert len(tokens) > 4 * SEGMENT
    memory: Cache | None = None
    logits = []
    # Streaming memory makes one pass over everything the same; segment memory has to know the segments.
    for inputs in tokens[:-1].split(len(tokens) if memory_type == "streaming" else SEGMENT):
        with torch.no_grad():
            output = model(inputs[None], past_key_values=memory, use_cache=True)
        memory = output.past_key_values
        logits.append(output.logits[0])
    loss = F.cross_entropy(torch.cat(logits), targets[1:], ignore_index=IGNORED).item()
    stored = TokenStream.open(result.output / "data" / "validation")
    scored = len(tokens) - len(stored.starts)
    assert result.validation_loss == pytest.approx(loss, rel=1e-5)
    assert result.bits_per_byte == pytest.approx(loss * scored / math.log(2) / stored.text_bytes, rel=1e-5)


@pytest.mark.parametrize(("parts", "length"), [(1, 4), (1, 7), (3, 4), (3, 5), (2, 50)])
def test_streams_hold_every_token_once_and_predict_the_next_one(parts: int, length: int) -> None:
    tokens = np.arange(1, 44, dtype=np.int32)
    stream = TokenStream(tokens, np.array([0, 7, 20, 35]), text_bytes=1)
    segments = StreamSegments(stream, length, parts=parts, pad=0)
    read, predicted = [], []
    for part in range(parts):
        for index in range(part, len(segments), parts):
            item = segments[index]
            assert {name: len(values) for name, values in item.items()} == dict.fromkeys(item, length)
            real = item["input_ids"] > 0
            follows = item["shift_labels"] > 0
            assert torch.equal(item["labels"], item["shift_labels"])
            assert torch.equal(item["shift_labels"][follows], item["input_ids"][follows] + 1)
            read += item["input_ids"][real].tolist()
            predicted += item["shift_labels"][item["shift_labels"] != IGNORED].tolist()
    last = 43 - segments.unused_tokens
    assert read == list(range(1, last))
    assert predicted == [token for token in range(2, last + 1) if token not in (8, 21, 36)]
    assert 0 <= segments.unused_tokens < parts


@pytest.mark.parametrize(
    ("attention_type", "memory_type", "precision", "step"),
    [
        ("rcmha", "streaming", "no", 6),
        pytest.param("rcmha", "segment", "no", 9, marks=pytest.mark.slow),
        pytest.param("mha", "streaming", "bf16", 9, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_the_straight_one_bit_for_bit(
    attention_type: str, memory_type: str, precision: str, step: int, corpus: Path, tmp_path: Path
) -> None:
    model = {"attention_type": attention_type, "memory_type": memory_type, **DROPOUT}
    straight = run(tmp_path / "straight", corpus, model, mixed_precision=precision)
    killed_run(step, tmp_path / "killed", corpus, model, mixed_precision=precision)
    resumed = run(tmp_path / "killed", corpus, model, mixed_precision=precision)
    names = ("step", "split", "loss", "grad_norm", "bits_per_byte")
    assert curve(resumed.output, *names) == curve(straight.output, *names)
    assert_same_weights(weights_of(resumed.model), weights_of(straight.model))


def test_micro_batches_have_memories_of_their_own_and_a_run_resumes_with_others(
    finished: dict[str, Result], corpus: Path, tmp_path: Path
) -> None:
    model, whole = {"memory_type": "streaming"}, finished["streaming"]
    halves = {"batch_size": STREAMS // 2, "gradient_accumulation_steps": 2}
    parted = run(tmp_path / "parted", corpus, model, **halves)
    killed_run(6, tmp_path / "resumed", corpus, model, **halves)
    resumed = run(tmp_path / "resumed", corpus, model)
    for result in (parted, resumed):
        for one, two in zip(curve(whole.output, "step", "loss"), curve(result.output, "step", "loss"), strict=True):
            assert one == pytest.approx(two, rel=1e-4)


def test_without_the_option_documents_are_packed_as_for_any_model(corpus: Path, tmp_path: Path) -> None:
    result = run(tmp_path / "run", corpus, carry_memory=False, mask_documents=True)
    first, *_, last = losses(result.output, "train")
    assert last < first - 0.3
    assert not list(result.output.glob("checkpoints/*/memory-*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama", "model_config": {"hidden_size": 32}}, "carry_memory is for models whose cache"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing runs the layers twice"),
        ({"compile": True, "cuda_graphs": True}, "cuda_graphs write every segment's hidden states to the same place"),
        ({"mask_documents": True}, "give mask_documents: false"),
        ({"model_config": MODEL | {"mem_len": None}}, "mem_len=None keeps everything; set mem_len"),
        (
            {"model_config": MODEL | {"attention_type": "mha", "position_scheme": "learned"}},
            "beyond the 64 tokens that have learned positions",
        ),
        (
            {"model_config": MODEL | {"memory_type": "segment", "mem_len": 50}},
            "a segment of 16 tokens and its memory of mem_len=50 exceed max_position_embeddings=64; use segments of up",
        ),
        ({"batch_size": 4000}, "too few for 4000 streams of sequence_length=16 or more"),
    ],
)
def test_what_cannot_carry_memory_is_told_before_anything_is_written(
    changes: dict[str, Any], message: str, corpus: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        run(tmp_path / "run", corpus, **changes)
    assert not (tmp_path / "run").exists()


@torch.no_grad()
@pytest.mark.parametrize("loaded", [(1, 4), (2, 2), (4, 1), (2, 1)], ids=str)
@pytest.mark.parametrize("saved", [(1, 1), (2, 2), (4, 1)], ids=str)
def test_every_stream_finds_its_memory_whoever_read_it(
    saved: tuple[int, int], loaded: tuple[int, int], tmp_path: Path
) -> None:
    """The rows of an update are divided among micro-batches first, and each of these among processes."""
    model = RCMHAForCausalLM(RCMHAConfig(vocab_size=30, **MODEL)).eval()
    ids = torch.randint(30, (8, SEGMENT), generator=torch.Generator().manual_seed(0))

    def memories(processes: int, micro_batches: int) -> list[tuple[Any, StreamMemory]]:
        parts = ids.reshape(micro_batches, processes, -1, SEGMENT)
        found = []
        for index in range(processes):
            memory = StreamMemory(model.config, micro_batches, segments=9)
            memory.caches = [cache_in(model(rows, use_cache=True)) for rows in parts[:, index]]
            place = SimpleNamespace(process_index=index, num_processes=processes, device=torch.device("cpu"))
            found.append((place, memory))
        return found

    for place, memory in memories(*saved):
        memory.save(tmp_path, place)
    for place, expected in memories(*loaded):
        memory = StreamMemory(model.config, loaded[1], segments=9)
        memory.load(tmp_path, place)
        for ours, theirs in zip(memory.caches, expected.caches, strict=True):
            torch.testing.assert_close(memory_tensors(ours), memory_tensors(theirs))


def test_the_shipped_settings_carry_memory() -> None:
    arguments = parse("rcmha.yaml")
    assert (arguments.model_type, arguments.carry_memory) == ("rcmha", True)


@pytest.mark.slow
def test_two_processes_carry_the_memory_of_one_and_resume(corpus: Path, tmp_path: Path) -> None:
    one = run(tmp_path / "one", corpus)
    options = {**RUN, "dataset": corpus, "model_config": MODEL, "batch_size": STREAMS // 2}
    call({**options, "output": tmp_path / "two"}, processes=2)
    names = ("step", "split", "tokens", "loss")
    straight = curve(tmp_path / "two", *names)
    for ours, theirs in zip(curve(one.output, *names), straight, strict=True):
        assert ours[:3] == theirs[:3] and ours[3] == pytest.approx(theirs[3], rel=1e-4)
    again = tmp_path / "two" / "checkpoints" / "step-000008"
    call({**options, "output": tmp_path / "again", "resume": again}, processes=2)
    assert curve(tmp_path / "again", *names) == [line for line in straight if line[0] > 8]
    single = run(tmp_path / "single", corpus, resume=str(again))
    for ours, theirs in zip(curve(single.output, *names), curve(tmp_path / "again", *names), strict=True):
        assert ours[3] == pytest.approx(theirs[3], rel=1e-4)
