"""The four-way comparison: its schedule and scores by hand, its bookkeeping, and a tiny one from end to end."""

import hashlib
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from dynattn.modeling.caches.names import cache_in, named_cache
from dynattn.scripts import cli
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.common.folder_lock import FolderLock
from dynattn.scripts.common.parallel_streams import ParallelStreams
from dynattn.scripts.reproduce.tiny_shakespeare import job, plan, text, training
from dynattn.scripts.reproduce.tiny_shakespeare.arguments import StudyArguments
from dynattn.scripts.reproduce.tiny_shakespeare.plan import SETTINGS, TYPES, Run, Setting
from dynattn.scripts.reproduce.tiny_shakespeare.progress import Tally
from dynattn.scripts.reproduce.tiny_shakespeare.record import check_comparable, make_record
from dynattn.scripts.reproduce.tiny_shakespeare.table import format_order
from dynattn.scripts.reproduce.tiny_shakespeare.text import Corpus, load_corpus

WORDS = ["speak", "we", "are", "accounted", "poor", "citizens", "the", "gods", "know"]
TINY = Setting(8, 8, "streaming", "relu2", streams=2, evaluation_streams=2, steps=3, warmup=1)


def corpus_of(tokens: int, vocabulary: int = 10) -> Corpus:
    characters = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(0))
    source: dict[str, str | int] = {"text": "unknown", "characters": tokens, "sha256": "0", "split": "whole"}
    return Corpus(characters, characters[: tokens // 2], "a" * vocabulary, {"train": source, "validation": source})


def run_of(setting: Setting, seed: int = 0, kind: str = "rcmha") -> Run:
    return Run("sensible", kind, seed, "tiny-shakespeare", setting, {"attention_type": kind})


@pytest.fixture
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    monkeypatch.setattr(plan, "MODEL", {**plan.MODEL, **small})


@pytest.fixture
def book(tmp_path: Path) -> str:
    """A text of 4,000 characters, as a file."""
    path = tmp_path / "book.txt"
    path.write_text(" ".join(random.Random(0).choices(WORDS, k=900))[:4000], encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("step", [1, 500, 2000, 2001, 8000])
def test_the_official_schedule_is_noam(step: int):
    expected = 128**-0.5 * min(step**-0.5, step * 2000**-1.5)
    assert training.noam_rate(step, 2000) == pytest.approx(expected)


def test_a_shorter_warmup_has_the_same_peak_and_falls_from_there():
    rates = [training.noam_rate(step, 70) for step in (35, 70, 280)]
    assert rates == pytest.approx([0.000988, 0.001976, 0.000988], rel=1e-3)


def test_bits_and_accuracy_of_known_predictions():
    """Three of four targets have probability 1/2 and are the likeliest, one has 1/8: bits 1, 1, 1 and 3."""
    logits = torch.log(torch.tensor([[[0.5, 0.25, 0.125, 0.125]] * 4]))
    targets = torch.tensor([[0, 0, 0, 3]])
    tally = Tally()
    for part in (slice(0, 3), slice(3, 4)):
        loss = nn.functional.cross_entropy(logits[0, part], targets[0, part])
        tally.add(logits[:, part], targets[:, part], loss)
    assert tally.scores() == {"accuracy": 0.75, "bits_per_character": pytest.approx(1.5), "tokens": 4}


def test_a_model_that_diverged_has_no_accuracy():
    """The likeliest of NaN logits is the first character, which may well be right."""
    tally, logits = Tally(), torch.full((1, 2, 4), math.nan)
    tally.add(logits, torch.zeros(1, 2, dtype=torch.long), logits.mean())
    assert math.isnan(tally.scores()["accuracy"])


class Counter(nn.Module):
    """Predicts that the next token is one more, with probability 1/2; its memory is how many segments it read."""

    def forward(self, input_ids: Tensor, use_cache: bool, **memory: int | None) -> CausalLMOutputWithPast:
        count = cache_in(memory)
        self.memories = [*getattr(self, "memories", []), count]
        one_more = nn.functional.one_hot((input_ids + 1) % 5, 5)
        probabilities = one_more * 0.5 + (1 - one_more) * 0.125
        return CausalLMOutputWithPast(logits=probabilities.log(), **named_cache((count or 0) + 1))


def test_scoring_carries_memory_and_counts_every_target_once():
    model = Counter()
    tokens = torch.arange(41) % 5
    tokens[10] = 3  # which is a wrong target, and has one
    scores = training.evaluate(model, ParallelStreams.cut(tokens, 2, 6))
    assert model.memories == [None, 1, 2, 3]
    assert scores == {"accuracy": 38 / 40, "bits_per_character": pytest.approx((38 * 1 + 2 * 3) / 40), "tokens": 40}


def test_a_type_with_another_activation_is_compared_with_the_same_type():
    assert plan.GROUPS["plateau"].baseline_of("rcmha, ReLU") == ("plateau", "rcmha")
    assert plan.GROUPS["plateau"].baseline_of("rcmha") == ("plateau", "mha")
    changed = plan.GROUPS["ablations"]
    assert {changed.baseline_of(variant) for variant in changed.variants} == {changed.baseline}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("steps", [3, 12, 40])
def test_training_scores_are_of_text_that_was_trained_on(seed: int, steps: int):
    corpus = replace(corpus_of(401), train=torch.arange(401), validation=torch.arange(101))
    run = run_of(replace(TINY, steps=steps, evaluation_streams=4), seed)
    streams = training.training_streams(run, corpus)
    first = training.first_segment(run, streams)
    trained = {
        token
        for index in range(first, min(first + steps, len(streams)))
        for token in streams[index][0].flatten().tolist()
    }
    seen = training.seen_text(run, corpus)
    assert first + steps <= len(streams) or first == 0
    assert set(seen.inputs.flatten().tolist()) <= trained
    assert seen.inputs.numel() == min(100, len(trained)) // 4 * 4
    assert torch.equal(seen.inputs + 1, seen.targets)


def test_text_of_fewer_characters_than_streams_of_the_validation_split_is_scored_as_well():
    run = run_of(replace(TINY, segment=2, evaluation_streams=64))
    seen = training.seen_text(run, corpus_of(5000))
    assert seen.inputs.shape == (2 * 6, 1), "three segments of two characters in two streams"


def test_seeds_start_at_different_places_and_variants_of_a_seed_at_the_same():
    streams = ParallelStreams.cut(torch.arange(5000), 2, 8)
    starts = [{training.first_segment(run_of(TINY, seed, kind), streams) for kind in TYPES} for seed in range(3)]
    assert all(len(places) == 1 for places in starts)
    assert len(set.union(*starts)) == 3


def kill_at(monkeypatch: pytest.MonkeyPatch, name: str, call: int) -> list[int]:
    """Lets a call of a function of the training end the process, as it were; returns the number of its calls."""
    original, calls = getattr(training, name), [0]

    def counted(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(training, name, counted)
    return calls


def check_that_it_goes_on(run: Run, corpus: Corpus, checkpoint: Path, expected: dict[str, Any]) -> None:
    """Runs into the kill, goes on, and wants what an undisturbed run has found."""
    with pytest.raises(KeyboardInterrupt):
        training.run_one(run, corpus, checkpoint)
    found = training.run_one(run, corpus, checkpoint)
    for name in ("curve", "train", "validation", "validations"):
        assert found.get(name) == expected.get(name)


def test_an_interrupted_run_goes_on_after_its_last_pass_as_if_nothing_had_happened(
    small_models: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    corpus, checkpoint = corpus_of(129), tmp_path / "run.checkpoint.pt"
    run = run_of(replace(TINY, steps=20))  # 8 segments to a pass
    expected = training.run_one(run, corpus, tmp_path / "other.checkpoint.pt")
    calls = kill_at(monkeypatch, "read_segment", 13)
    check_that_it_goes_on(run, corpus, checkpoint, expected)
    assert calls == [13 + 12 + 4 + 4]  # the updates after the first pass, then the segments of both splits


def test_an_interrupted_run_does_not_go_on_with_another_text(
    small_models: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of the same length, with the same characters."""
    corpus, checkpoint = corpus_of(129), tmp_path / "run.checkpoint.pt"
    source = {**corpus.sources["train"], "sha256": "1"}
    other = replace(corpus, train=corpus.train.flip(0), sources={"train": source, "validation": source})
    run = run_of(replace(TINY, steps=20))
    expected = training.run_one(run, corpus, tmp_path / "other.checkpoint.pt")
    kill_at(monkeypatch, "read_segment", 13)
    with pytest.raises(KeyboardInterrupt):
        training.run_one(run, other, checkpoint)
    assert checkpoint.exists()
    found = training.run_one(run, corpus, checkpoint)
    assert (found["curve"], found["validation"]) == (expected["curve"], expected["validation"])


def test_training_ends_when_passes_stop_helping_and_tells_the_best(
    small_models: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Losses after each pass: the third is the best, and two that are no better follow."""
    losses = [3.0, 2.5, 2.25, 2.25, 2.375, 1.0]
    corpus, checkpoint = corpus_of(65), tmp_path / "run.checkpoint.pt"  # 4 segments to a pass
    run = run_of(replace(TINY, steps=100, patience=2))

    told = iter(losses)

    def evaluate(model: nn.Module, streams: ParallelStreams) -> dict[str, float]:
        loss = next(told)
        return {"accuracy": 1 / loss, "bits_per_character": loss, "tokens": 1}

    monkeypatch.setattr(training, "evaluate", evaluate)
    found = training.run_one(run, corpus, checkpoint)
    assert [scores["bits_per_character"] for scores in found["validations"]] == losses[:5]
    assert found["validation"]["bits_per_character"] == 2.25
    assert [point["step"] for point in found["curve"]] == [4, 8, 12, 16, 20]
    assert found["train"]["bits_per_character"] == losses[5]
    assert found["settings"]["patience"] == 2
    assert "patience" not in run_of(TINY).settings()


def test_a_run_without_an_end_goes_on_with_its_validations(
    small_models: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    corpus, checkpoint = corpus_of(65), tmp_path / "run.checkpoint.pt"
    run = run_of(replace(TINY, steps=12, patience=9))
    expected = training.run_one(run, corpus, tmp_path / "other.checkpoint.pt")
    assert len(expected["validations"]) == 3
    kill_at(monkeypatch, "evaluate", 3)
    check_that_it_goes_on(run, corpus, checkpoint, expected)


def test_a_text_that_is_too_short_for_the_streams_is_told_before_the_first_run():
    with pytest.raises(
        UserError, match="too few for 5000 streams; each needs two or more; give a longer text, or fewer"
    ):
        job.choose_setting(StudyArguments(data="book.txt", streams=5000), plan.GROUPS["official"], corpus_of(2049))


def test_groups_that_run_for_days_are_asked_for_by_name():
    assert [group for group in StudyArguments(data="book.txt").groups if group.startswith("plateau")] == []
    corpus = corpus_of(2049)
    for name, streams in (("plateau", 4), ("plateau-official", 32)):
        setting = job.choose_setting(StudyArguments(data="book.txt", groups=[name]), plan.GROUPS[name], corpus)
        assert setting.patience == plan.PATIENCE and setting.warmup == 2000 and setting.streams == streams
        segments = len(ParallelStreams.cut(corpus.train, streams, setting.segment))
        assert setting.steps == plan.MOST_PASSES * segments
        kinds = {fields["attention_type"] for fields in plan.GROUPS[name].variants.values()}
        acts = {fields.get("hidden_act", setting.hidden_act) for fields in plan.GROUPS[name].variants.values()}
        assert kinds == set(TYPES) and acts == {"relu", "relu2"}


def test_the_checkpoint_goes_when_the_result_is_written_and_not_before(
    small_models: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, corpus, path = run_of(replace(TINY, steps=10)), corpus_of(65), tmp_path / "runs/run.json"

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    path.parent.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(job, "write_json", full)
        with pytest.raises(OSError, match="no space"):
            job.make_once(run, corpus, path)
    assert [file.name for file in path.parent.iterdir()] == ["run.checkpoint.pt"]
    job.make_once(run, corpus, path)
    assert [file.name for file in path.parent.iterdir()] == ["run.json"]


def test_memory_starts_anew_with_every_pass(small_models: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    memories: list[bool] = []
    read = training.read_segment

    def watch(model: nn.Module, inputs: Tensor, targets: Tensor, memory: Any) -> Any:
        memories.append(memory is not None)
        return read(model, inputs, targets, memory)

    monkeypatch.setattr(training, "read_segment", watch)
    corpus = corpus_of(65)
    run = run_of(replace(TINY, steps=10))  # 4 segments to a pass
    model = training.make_model(run, corpus)
    training.train(model, run, corpus, tmp_path / "checkpoint.pt")
    assert memories == [False, True, True, True] * 2 + [False, True]


def test_position_tables_are_counted_apart():
    corpus = corpus_of(100, vocabulary=65)
    sizes = {
        kind: training.count_parameters(training.make_model(run_of(SETTINGS["official"], kind=kind), corpus))
        for kind in TYPES
    }
    rows, layers, channels = 34, 6, 128 + 8
    assert sizes["mha"] == {"all": 811_841, "position_tables": 0}
    assert sizes["mdha"] == {"all": 812_993, "position_tables": 0}
    assert sizes["rcmha"]["position_tables"] == rows * channels * layers
    # The official tables have 8,192 rows, with which it is 7,496,897 parameters.
    assert sizes["rcmha"]["all"] - rows * channels * layers == 7_496_897 - 8192 * channels * layers


def result_of(group: str, kind: str, seed: int, accuracy: float) -> dict[str, Any]:
    scores = {"accuracy": accuracy, "bits_per_character": 4 - accuracy, "tokens": 1000}
    setting = SETTINGS["official" if group == "official" else "sensible"]
    source = {"text": "unknown", "characters": 4000, "sha256": "0", "split": "whole"}
    return {
        "settings": Run(group, kind, seed, "tiny-shakespeare", setting, {"attention_type": kind}).settings(),
        "data": {"train": source, "validation": source, "vocabulary": 30},
        "parameters": {"all": 1200, "position_tables": 200 if kind.startswith("r") else 0},
        "train": scores, "validation": scores, "all_training_batches": scores,
        "curve": [{"step": step, "bits_per_character": 5 - accuracy * step} for step in (1, 2)],
        **dict.fromkeys(("train_seconds", "train_cpu_seconds", "tokens_per_second", "wall_seconds"), 100.0),
        "threads": 1, "hardware": "a machine", "versions": {"torch": "2", "transformers": "5"},
    }  # fmt: skip


def runs_of(group: str, accuracies: dict[str, list[float]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    return {
        (group, kind): [result_of(group, kind, seed, value) for seed, value in enumerate(values)]
        for kind, values in accuracies.items()
    }


def test_incomplete_groups_are_compared_on_the_seeds_that_both_sides_have():
    runs = runs_of("sensible", {"mha": [0.5, 0.52, 0.54], "mdha": [0.6, 0.61], "rmha": [0.4]})
    record = make_record(runs, probe=None)
    assert [(cell["variant"], cell["seeds"]) for cell in record["cells"]] == [
        ("mha", [0, 1, 2]), ("mdha", [0, 1]), ("rmha", [0])
    ]  # fmt: skip
    mdha, rmha = record["comparisons"]
    assert (mdha["than"], mdha["seeds"], rmha["seeds"]) == (["sensible", "mha"], [0, 1], [0])
    assert mdha["accuracy"]["mean"] == pytest.approx(0.095)
    assert rmha["accuracy"]["p"] is None
    assert record["orders"] == []


IN_ORDER = {"mha": [0.5, 0.5], "mdha": [0.4, 0.4], "rmha": [0.3, 0.3], "rcmha": [0.6, 0.6]}
IN_ORDER_ONCE = {"mha": [0.5, 0.4], "mdha": [0.4, 1.0], "rmha": [0.3, 0.5], "rcmha": [0.6, 0.7]}


@pytest.mark.parametrize(
    ("accuracies", "order", "seeds"),
    [(IN_ORDER, ["rcmha", "mha", "mdha", "rmha"], [0, 1]), (IN_ORDER_ONCE, ["mdha", "rcmha", "mha", "rmha"], [0])],
)
def test_the_papers_order_is_checked_on_means_and_in_every_seed(
    accuracies: dict[str, list[float]], order: list[str], seeds: list[int]
):
    (found,) = make_record(runs_of("sensible", accuracies), probe=None)["orders"]
    assert found["order"] == order
    assert found["is_the_papers"] == (accuracies is IN_ORDER)
    assert found["seeds_in_the_papers_order"] == seeds
    assert [(pair["variant"], pair["than"][1]) for pair in found["pairs"]] == [
        ("rcmha", "mha"), ("mha", "mdha"), ("mdha", "rmha")
    ]  # fmt: skip


def test_a_pair_without_a_test_says_why():
    (several,) = make_record(runs_of("sensible", IN_ORDER), probe=None)["orders"]
    assert "rcmha - mha: +0.1000 (no spread to test)" in format_order(several)
    (one,) = make_record(runs_of("sensible", {kind: [values[0]] for kind, values in IN_ORDER.items()}), None)["orders"]
    assert "rcmha - mha: +0.1000 (no test on one seed)" in format_order(one)


def test_table_and_plots_come_from_the_files_of_finished_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for group in ("sensible", "official"):
        for results in runs_of(group, IN_ORDER_ONCE).values():
            write_runs(tmp_path, *({**result, "commit": "earlier"} for result in results))
    assert cli.main(["reproduce", "tiny-shakespeare", "--output", str(tmp_path), "--report_only"]) == 0
    shown = capsys.readouterr().out
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert table in shown and "runs were made with other code: commit earlier; this is" in shown
    assert "| rmha | 2 | 1,200 | 1,000 | 0.4000 ± 0.1414 |" in table
    assert "rcmha > mha > mdha > rmha **does not hold**" in table
    assert "1 of 2 seeds" in table
    assert "| accuracy | 0.566 | 0.557 | 0.555 | 0.572 |" in table
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("curves.png", "bars.png"))


def test_runs_that_diverged_are_told(tmp_path: Path):
    results = runs_of("sensible", {"mha": [0.5, 0.52], "mdha": [0.6, 0.61], "rmha": [0.4, 0.41], "rcmha": [0.7, 0.71]})
    results["sensible", "mdha"][1]["validation"] = {
        "accuracy": math.nan,
        "bits_per_character": math.nan,
        "tokens": 1000,
    }
    for runs in results.values():
        write_runs(tmp_path, *runs)
    assert cli.main(["reproduce", "tiny-shakespeare", "--output", str(tmp_path), "--report_only"]) == 0
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "| diverged on seed 1 | 3.3950 ± 0.0071 |" in text
    assert json.loads((tmp_path / "record.json").read_text())["orders"][0]["seeds"] == [0]
    assert "NaN" not in (tmp_path / "record.json").read_text()


def write_runs(output: Path, *results: dict[str, Any]) -> None:
    """As finished runs of a study."""
    for result in results:
        settings = result["settings"]
        path = output / f"runs/{settings['group']}/{settings['variant']}-seed-{settings['seed']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result), encoding="utf-8")


def changed(result: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {**result, "settings": {**result["settings"], **settings}}


OTHER_TEXT = {"train": {"sha256": "1"}, "validation": {"sha256": "1"}, "vocabulary": 30}


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (changed(result_of("sensible", "mha", 5, 0.5), steps=10), "sensible: mha, seed 5, .* differ in steps"),
        (changed(result_of("sensible", "rmha", 0, 0.5), steps=10), "sensible: rmha, seed 0, .* differ in steps"),
        (changed(result_of("sensible", "mha", 5, 0.5), model={"mem_len": 1}), "mha, seed 5, .* differ in model"),
        ({**result_of("sensible", "mha", 5, 0.5), "data": OTHER_TEXT}, "differ in text;"),
        # Ablations are compared with a run of another group.
        (
            changed(result_of("ablations", "mha, rotary", 0, 0.5), steps=10),
            "mha, rotary, seed 0, .* in steps",
        ),
    ],
    ids=["seed", "variant", "model", "text", "baseline"],
)
def test_runs_that_were_made_in_other_ways_are_not_reported_together(other: dict[str, Any], told: str, tmp_path: Path):
    write_runs(tmp_path, *(result_of("sensible", "mha", seed, 0.5) for seed in range(2)), other)
    with pytest.raises(UserError, match=told):
        job.report(tmp_path)
    assert not (tmp_path / "record.json").exists()


def test_runs_of_groups_that_are_not_compared_may_be_of_any_length():
    longer = changed(result_of("longer", "mha", 0, 0.5), steps=10)
    check_comparable([result_of("sensible", "mha", 0, 0.5), longer])


def test_nothing_is_trained_into_a_folder_with_runs_that_do_not_compare(
    book: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Though no file of them is among those that would be made."""
    write_runs(tmp_path / "study", changed(result_of("sensible", "mha", 5, 0.5), steps=10))
    monkeypatch.setattr(job, "run_one", None)
    command = ["reproduce", "tiny-shakespeare", "--other_text", "--data", book, "--output", str(tmp_path / "study")]
    assert cli.main([*command, "--seeds", "0", "1"]) == 2
    assert "sensible: mha, seed 0, finished or asked for, differ in steps, text; give" in capsys.readouterr().err


def test_one_process_at_a_time_makes_the_runs_of_a_study(book: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with FolderLock(tmp_path / "study" / ".lock"):
        command = ["reproduce", "tiny-shakespeare", "--quick", "--other_text", "--data", book]
        assert cli.main([*command, "--output", str(tmp_path / "study")]) == 2
    assert "study is in use by process" in capsys.readouterr().err


def test_a_report_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["reproduce", "tiny-shakespeare", "--output", str(tmp_path), "--report_only"]) == 2
    assert "holds no finished run" in capsys.readouterr().err


def test_the_last_tenth_is_held_out_and_characters_are_numbered_in_order(book: str):
    content = Path(book).read_text(encoding="utf-8")
    corpus = load_corpus(book)
    assert corpus.vocabulary == "".join(sorted(set(content)))
    assert "".join(corpus.vocabulary[token] for token in (*corpus.train, *corpus.validation)) == content
    assert (len(corpus.train), len(corpus.validation)) == (3600, 400)


def test_a_text_of_its_own_to_validate_on_shares_the_vocabulary(book: str, tmp_path: Path):
    other = tmp_path / "other.txt"
    other.write_text("Zebra, " * 200, encoding="utf-8")
    corpus = load_corpus(book, str(other))
    assert (len(corpus.train), len(corpus.validation)) == (4000, 1400)
    assert corpus.vocabulary[corpus.validation[0]] == "Z"
    assert corpus.sources["validation"]["split"] == "whole"


def test_a_known_text_is_told_by_its_checksum_and_another_is_refused(book: str, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match=r"is not Tiny Shakespeare: its sha256 is [0-9a-f]{64}; .*--other_text"):
        load_corpus(book, expect="Tiny Shakespeare")
    digest = hashlib.sha256(Path(book).read_bytes()).hexdigest()
    monkeypatch.setitem(text.KNOWN, digest, "Tiny Shakespeare")
    sources = load_corpus(book, expect="Tiny Shakespeare").sources
    assert [sources[split]["text"] for split in ("train", "validation")] == ["Tiny Shakespeare"] * 2


def test_the_rows_of_a_dataset_are_one_text(tmp_path: Path):
    lines = [f"line {number}" for number in range(300)]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.txt").write_text("\n".join(lines), encoding="utf-8")
    assert text.read_text(str(tmp_path / "folder")) == "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "there is no file"), (b"\xff" * 2000, "cannot read .* as UTF-8"), (b"short", "has 5 characters")],
)
def test_unusable_files_are_refused(content: bytes | None, message: str, tmp_path: Path):
    path = tmp_path / "book.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        text.read_text(str(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--groups", "large"], "there is no group 'large'; choose from sensible, longer, official"),
        (["--seeds", "1", "1"], "must be one or more different ones"),
        (["--steps", "0"], "steps=0 must be a positive number"),
        (["--epochs", "nan"], "epochs=nan must be a positive number"),
        (["--steps", "1", "--epochs", "2"], "give one"),
        (["--wikitext_train", "a.txt"], "give both"),
        (["--data", "a.txt", "--groups", "wikitext-2"], "groups=['wikitext-2'] train on WikiText-2; give"),
        ([], "give --data"),
    ],
)
def test_options_that_cannot_be_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["reproduce", "tiny-shakespeare", *options]) == 2
    assert message in capsys.readouterr().err


def test_epochs_are_passes_over_the_text_and_warmup_is_official_only_for_the_official_setting():
    arguments = StudyArguments(data="book.txt", epochs=10)
    corpus = corpus_of(1_003_854)
    settings = {group: job.choose_setting(arguments, plan.GROUPS[group], corpus) for group in ("official", "sensible")}
    assert (settings["official"].steps, settings["official"].warmup) == (156_850, 2000)
    assert (settings["sensible"].steps, settings["sensible"].warmup) == (19_610, 1961)


def test_a_quick_study_runs_all_types_once_and_reports_them(
    small_models: None, book: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "study"
    command = ["reproduce", "tiny-shakespeare", "--quick", "--other_text", "--data", book, "--output", str(output)]
    command += ["--wikitext_train", book, "--wikitext_validation", book]
    assert cli.main([*command, "--steps", "2"]) == 0
    record = json.loads((output / "record.json").read_text(encoding="utf-8"))
    assert [len(cell["seeds"]) for cell in record["cells"]] == [2] * 24
    groups = ["sensible", "longer", "official", "official-longer", "wikitext-2"]
    assert [order["group"] for order in record["orders"]] == groups
    probe = record["probe"]["settings"]
    assert all(probe[setting][kind]["peak_bytes"] > 0 for setting in SETTINGS for kind in TYPES)
    assert probe["sensible"]["mha"]["times_mha"] == 1
    assert not list(output.rglob("*.pt"))

    monkeypatch.setattr(job, "run_one", None)
    assert cli.main([*command, "--steps", "2"]) == 0
    assert capsys.readouterr().out.count("done before") == 48
    assert cli.main([*command, "--steps", "3"]) == 2
    assert "sensible: mha, seed 0, finished or asked for, differ in steps; give another" in capsys.readouterr().err
