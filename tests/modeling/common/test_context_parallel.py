"""Processes that share sequences compute what one process computes of whole ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases.models import SMALL, make_model
from cases.processes import in_processes
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

import dynattn
from dynattn import ContextParallel

TOKENS = 48
PLAIN = {"compose_pre": False, "compose_post": False}
CASES: dict[str, dict[str, Any]] = {
    "windows and fewer keys": {},
    "query-wise composition": {"compose_key_wise": False},
    "no composition": PLAIN,
    "no composition, by the definition": {**PLAIN, "attn_implementation": "eager"},
    "the definition": {"attn_implementation": "eager"},
    "static composition": dynattn.mixer_fields("talking_heads"),
    "differential heads": {**dynattn.mixer_fields("differential"), "num_key_value_heads": 6},
    "ALiBi": {"position_scheme": "alibi", "compose_position_bias": True},
    "learned bias by distance": {"position_scheme": "t5", **PLAIN},
    "learned gain by distance": {"position_gain": "distance"},
    "learned positions": {"position_scheme": "learned"},
}


def shared(processes: int, folder: Path, work: Callable[[ContextParallel], None]) -> None:
    """Runs `work` in so many processes, with a context of all of them."""

    def begin() -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        work(ContextParallel(init_device_mesh("cpu", (processes,))))
        dist.destroy_process_group()

    in_processes([folder / f"{rank}.txt" for rank in range(processes)], begin)


def texts(*, packed: bool) -> dict[str, Tensor]:
    """Two rows of tokens, their targets, and positions that begin anew at other places in each row if `packed`."""
    ids = torch.randint(97, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": ids, "labels": ids, "shift_labels": torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)}
    if packed:
        places = torch.arange(TOKENS).expand(2, -1)
        batch["position_ids"] = places - torch.tensor([[17], [30]]) * (places >= torch.tensor([[17], [30]]))
    return batch


def logits_and_gradients(model: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits `[B, T, V]`, and the gradients of the loss, which is a sum over targets divided by a fixed number."""
    model.zero_grad()
    output = model(**batch, num_items_in_batch=torch.tensor(90.0), use_cache=False)
    output.loss.backward()
    return output.logits.detach(), {name: weight.grad for name, weight in model.named_parameters()}


def assert_parts_make_the_whole(context: ContextParallel, model: PreTrainedModel, batch: dict[str, Tensor]) -> None:
    """Compares logits, and gradients summed over processes, with those of whole sequences."""
    expected, gradients = logits_and_gradients(model, batch)
    model.set_context_parallel(context)
    part = {name: context.take(tensor) for name, tensor in batch.items()}
    found, shares = logits_and_gradients(model, part)
    torch.testing.assert_close(context.gather(found), expected, rtol=1e-11, atol=1e-11)
    for name, gradient in gradients.items():
        if gradient is not None:
            dist.all_reduce(shares[name])
            torch.testing.assert_close(shares[name], gradient, rtol=1e-10, atol=1e-11, msg=name)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_compute_what_one_does(name: str, tmp_path: Path) -> None:
    def work(context: ContextParallel) -> None:
        for packed in (False, True):
            model = make_model(**CASES[name]).double().train()
            assert_parts_make_the_whole(context, model, texts(packed=packed))

    shared(2, tmp_path, work)


def test_three_processes_compute_what_one_does_for_a_dcpythia_that_recomputes_its_layers(tmp_path: Path) -> None:
    def work(context: ContextParallel) -> None:
        torch.manual_seed(1)
        sizes = {name: size for name, size in SMALL.items() if name not in ("num_key_value_heads", "layer_types")}
        model = dynattn.DCPythiaForCausalLM(dynattn.DCPythiaConfig(**sizes)).double().train()
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": dynattn.keep_attention_outputs})
        assert_parts_make_the_whole(context, model, texts(packed=True))

    shared(3, tmp_path, work)


def test_chunks_of_a_process_have_as_many_visible_pairs_as_those_of_any_other(tmp_path: Path) -> None:
    def work(context: ContextParallel) -> None:
        whole = torch.arange(TOKENS)[None]
        part = context.take(whole)
        assert context.gather(part).equal(whole)
        for chunk, end in context.chunks(part.shape[1]):
            assert part[0, chunk][-1] == end - 1
        pairs = (part + 1).sum()
        every = [torch.empty_like(pairs) for _ in range(context.processes)]
        dist.all_gather(every, pairs)
        assert len(set(map(int, every))) == 1

    shared(4, tmp_path, work)


def test_what_belongs_to_whole_sequences_is_refused(tmp_path: Path) -> None:
    def work(context: ContextParallel) -> None:
        model, part = make_model(), {name: context.take(tensor) for name, tensor in texts(packed=False).items()}
        ids = part["input_ids"]
        model.set_context_parallel(context)
        refused: list[tuple[str, Callable[[], object]]] = [
            ("give shift_labels", lambda: model(ids, labels=ids)),
            ("'attention_mask'.* cannot be given", lambda: model(ids, attention_mask=torch.ones_like(ids))),
            ("'past_key_values'.* call set_context_parallel", lambda: model.generate(ids, max_new_tokens=1)),
            ("'cu_seq_lens'", lambda: model(ids[:1], cu_seq_lens_q=torch.tensor([0, ids.shape[1]]))),
            ("leave output_attentions", lambda: model(ids, output_attentions=True)),
            ("multiple of 4", lambda: context.take(torch.zeros(1, 10))),
            ("reads whole sequences", lambda: classifier.set_context_parallel(context)),
            ("'carope' reads all", lambda: make_model(position_scheme="carope").set_context_parallel(context)),
            ("'flash_attention_2' cannot attend", lambda: flash(ids)),
            ("the mesh has 2 dimensions", lambda: ContextParallel(init_device_mesh("cpu", (1, 2)))),
        ]
        classifier = dynattn.DCFormerForSequenceClassification(model.config)
        flash = make_model(**PLAIN)
        flash.config._attn_implementation = "flash_attention_2"
        flash.set_context_parallel(context)
        for message, call in refused:
            with pytest.raises(ValueError, match=message):
                call()
        model.set_context_parallel(None)
        assert model.generate(ids, max_new_tokens=1, do_sample=False).shape[1] == ids.shape[1] + 1

    shared(2, tmp_path, work)
