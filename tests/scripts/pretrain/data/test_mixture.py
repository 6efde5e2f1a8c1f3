"""Mixtures: shares, passes over each source, resuming, and what cannot be mixed."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.training import curve, killed_run, run, write_corpus, write_state

from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain import PretrainArguments
from dynattn.scripts.pretrain.data.batch_order import (
    MIXTURE_BLOCK,
    MixtureOrder,
    TrainingOrder,
    apportion,
    block_within,
)
from dynattn.scripts.pretrain.outputs import checkpoint

SIZES, WEIGHTS = [100, 30, 1000], [0.5, 0.2, 0.3]


def make(skip: int = 0) -> MixtureOrder:
    return MixtureOrder(["a", "b", "c"], SIZES, WEIGHTS, global_batch=64, seed=3, skip=skip)


def test_every_block_has_exactly_the_shares():
    quotas = apportion([0.5, 0.2, 0.3, 1e-9], MIXTURE_BLOCK)
    assert quotas.sum() == MIXTURE_BLOCK
    assert quotas.tolist() == [8192, 3276, 4915, 1]
    assert apportion([1, 1, 200_000], MIXTURE_BLOCK).tolist() == [1, 1, MIXTURE_BLOCK - 2]
    assert apportion([1e-9] * 4 + [1], 5).tolist() == [1] * 5


@pytest.mark.parametrize(("epochs", "sizes"), [([2, 1], [300, 300]), ([1, 1, 3], [9_000, 70, 4_001]), ([0.5], [7])])
def test_a_run_of_whole_epochs_reads_each_source_exactly_as_often(epochs: list[float], sizes: list[int]):
    weights = [count * size for count, size in zip(epochs, sizes, strict=True)]
    block = block_within(sum(weights), len(sizes))
    order = MixtureOrder(list("abc")[: len(sizes)], sizes, weights, global_batch=1, seed=3)
    order.divide(block)
    blocks = round(sum(weights) / block)
    read = Counter(order.at(np.arange(blocks * block)).tolist())
    first = np.cumsum([0, *sizes])
    for source, (count, size) in enumerate(zip(epochs, sizes, strict=True)):
        times = [read[index] for index in range(first[source], first[source + 1])]
        assert sum(times) == pytest.approx(count * size, abs=blocks)
        assert max(times) - min(times) <= 1


def test_sources_get_their_shares_and_are_read_epoch_after_epoch():
    seen = np.concatenate([make()[step] for step in range(MIXTURE_BLOCK // 64)])
    first = np.cumsum([0, *SIZES])
    for source, (size, weight) in enumerate(zip(SIZES, WEIGHTS, strict=True)):
        mine = seen[(seen >= first[source]) & (seen < first[source + 1])] - first[source]
        assert len(mine) == pytest.approx(weight * MIXTURE_BLOCK, abs=1)
        whole = len(mine) // size * size
        assert (np.sort(mine[:whole].reshape(-1, size)) == np.arange(size)).all()
    assert make().passes(10)["a"] == pytest.approx(640 * 0.5 / 100, rel=1e-3)


def test_an_update_reads_the_same_wherever_a_run_begins():
    order = make()
    expected = [order[step].tolist() for step in (300, 3, 299)]
    assert expected == [make()[step].tolist() for step in (300, 3, 299)]
    assert make(skip=64)[2].tolist() == order[3].tolist()


def test_the_seed_shuffles_the_sources_too():
    order, other = (MixtureOrder(["a", "b"], [1, 1], [1, 1], 32, seed) for seed in (0, 1))
    assert order[0].tolist() != other[0].tolist()


def test_metrics_name_the_passes_over_several_sources():
    order = MixtureOrder(["a", "b"], [2, 4], [1, 1], global_batch=3, seed=0)
    assert order.passes_for_metrics(4) == {"passes_a": 3.0, "passes_b": 1.5}
    assert TrainingOrder(8, global_batch=3, seed=0).passes_for_metrics(4) == {"passes": 1.5}


def mixture(tmp_path: Path, **second: Any) -> dict[str, Any]:
    one, two = (write_corpus(tmp_path / f"{name}.jsonl", longest) for name, longest in (("one", 3), ("two", 5)))
    options = {} if "epochs" in second else {"weight": 1}
    sources = {"one": {"dataset": str(one), **(options or {"epochs": 1})}, "two": {"dataset": str(two), **options}}
    sources["two"] |= second
    return {"dataset": "builtin", "mixture": sources}


def test_a_killed_run_on_a_mixture_resumes_to_the_same_curve(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    options = mixture(tmp_path)
    whole = run(tmp_path / "whole", tmp_path, **options)
    assert "two is read" in capfd.readouterr().out
    killed_run(tmp_path / "run", tmp_path, 7, **options)
    resumed = run(tmp_path / "run", tmp_path, **options)
    assert curve(resumed.output, "step", "loss") == curve(whole.output, "step", "loss")
    assert Counter(path.name for path in (whole.output / "data").iterdir()) == Counter(
        ["one", "two", "validation", "source.json"]
    )


def test_epochs_make_one_pass_as_long_as_all_of_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    run(tmp_path / "run", tmp_path, **mixture(tmp_path, epochs=2), max_steps=2, warmup_steps=0)
    told = dict(line.split(" is read ") for line in capfd.readouterr().out.splitlines() if " is read " in line)
    assert float(told["two"].split()[0]) == pytest.approx(2 * float(told["one"].split()[0]), rel=0.1)


def sizes_of(output: Path) -> list[int]:
    """How many sequences of 32 tokens the sources `one` and `two` have, if they are there."""
    files = [output / "data" / name / "tokens.bin" for name in ("one", "two")]
    return [file.stat().st_size // 4 // 32 for file in files if file.exists()]


def test_a_run_of_one_epoch_reads_each_source_as_often_as_its_epochs_say(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    options = {**mixture(tmp_path, epochs=2, max_epochs=2), "max_steps": None}
    result = run(tmp_path / "run", tmp_path, **options)
    one, two = sizes_of(result.output)
    assert result.steps == -(-(one + 2 * two) // 4)
    told = dict(line.split(" is read ") for line in capfd.readouterr().out.splitlines() if " is read " in line)
    for name, size, epochs in (("one", one, 1), ("two", two, 2)):
        assert epochs <= float(told[name].split()[0]) + 0.01 <= epochs + 0.02 + 4 / size
    with pytest.raises(UserError, match=r"would read two .* times, and its max_epochs is 2; lower epochs"):
        run(tmp_path / "long", tmp_path, **options, epochs=1.5)


def test_a_mixture_of_one_source_has_epochs_too(tmp_path: Path):
    source = {"dataset": str(write_corpus(tmp_path / "one.jsonl")), "epochs": 2, "max_epochs": 2}
    options = {"dataset": "builtin", "mixture": {"one": source}, "max_steps": None}
    result = run(tmp_path / "run", tmp_path, **options)
    assert result.steps == -(-2 * sizes_of(result.output)[0] // 4)
    with pytest.raises(UserError, match=r"would read the data .* times, and its max_epochs is 2"):
        run(tmp_path / "long", tmp_path, **options, epochs=2.0)


def test_a_run_of_an_earlier_version_keeps_the_length_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It took each sequence once, and its checkpoints do not say so."""
    output, options = tmp_path / "run", {**mixture(tmp_path, epochs=2), "max_steps": None, "save_every": 2}
    with monkeypatch.context() as patch:
        patch.setattr(PretrainArguments, "has_source_epochs", False)
        killed_run(output, tmp_path, 3, **options)
    state = checkpoint.read_state(saved := output / "checkpoints" / "step-000002")
    del state["fingerprint"]["pass_length"], state["fingerprint"]["mixture_block"], state["checksum"]
    write_state(saved, state)
    killed_run(output, tmp_path, 5, **options)
    assert run(output, tmp_path, **options).steps == -(-sum(sizes_of(output)) // 4)


def test_too_many_passes_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"would read two .* times, and its max_epochs is 0.5"):
        run(tmp_path / "run", tmp_path, **mixture(tmp_path, max_epochs=0.5))


@pytest.mark.parametrize("name", ["validation", "source.json"])
def test_a_source_does_not_take_the_place_of_other_data(name: str, tmp_path: Path):
    sources = mixture(tmp_path)["mixture"]
    held_out = write_corpus(tmp_path / "held-out.jsonl")
    with pytest.raises(UserError, match=rf"mixture\.{name}: source\.json and validation are taken; call this source"):
        run(
            tmp_path / "run",
            Path("builtin"),
            mixture={name: sources["one"], "two": sources["two"]},
            validation_dataset=str(held_out),
        )
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_source_may_lie_below_the_home_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/me")
    arguments = PretrainArguments(output="run", mixture='{"a": {"dataset": "~/x.txt", "weight": 1}}')
    assert arguments.sources["a"].dataset == "/home/me/x.txt"


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"a": {"dataset": "x.txt"}}, "needs either weight or epochs"),
        ({"a": {"dataset": "x.txt", "weight": 1, "epochs": 1}}, "needs either weight or epochs"),
        ({"a": {"dataset": "x.txt", "weight": 0}}, "weight=0 must be a positive number"),
        ({"a": {"dataset": "x.txt", "weigth": 1}}, "must be a mapping of dataset, epochs, max_epochs, weight"),
        ({"a": {"dataset": "x.txt", "weight": 1}, "b": {"dataset": "y.txt", "epochs": 1}}, "choose one for all"),
        ({"a/b": {"dataset": "x.txt", "weight": 1}}, "letters, digits, dots and dashes"),
        ({"..": {"dataset": "x.txt", "weight": 1}}, "not dots alone"),
        ({2024: {"dataset": "x.txt", "weight": 1}}, r"mixture\.2024: .* put it in quotes"),
        ({"a": {"dataset": None, "weight": 1}}, "must be a mapping of .*, with dataset"),
        ({}, "the mixture is empty"),
        ("[1]", "must be a mapping"),
        ("{", "is not JSON"),
        ('{"a": {"dataset": "x.txt", "weight": 1}, "a": {"dataset": "y.txt", "weight": 1}}', "a is given twice"),
    ],
)
def test_a_mixture_that_means_nothing_is_refused(sources: Any, message: str):
    with pytest.raises(UserError, match=message):
        PretrainArguments(output="run", mixture=sources)
