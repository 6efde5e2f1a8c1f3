"""The record of a GPU on a machine without one: the tuner, what is planned, and what is left out when time is over."""

import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynattn.modeling.ops.dcmha.triton import tuning as kernel_tuning
from dynattn.scripts.benchmark import gpu_preset as preset
from dynattn.scripts.benchmark import main as benchmark
from dynattn.scripts.benchmark.arguments import BenchmarkArguments, read_settings
from dynattn.scripts.benchmark.gpu_preset import GPU, Part, make_trial, options_of, run_preset
from dynattn.scripts.benchmark.harness.settings import Settings
from dynattn.scripts.benchmark.harness.shapes import parse_shape
from dynattn.scripts.benchmark.harness.tuning import Knob, Tuning, tune, using

BLOCK, LEFT, RIGHT = (
    Knob("BLOCK", (16, 32, 64)),
    Knob("TILES", ((1, 2), (4, 4)), "left"),
    Knob("TILES", ((8, 8),), "right"),
)


@pytest.fixture
def module() -> Any:
    return SimpleNamespace(BLOCK=32, TILES={"left": (1, 2), "right": (3, 3)})


def test_constants_have_other_values_for_a_while(module: Any) -> None:
    tiles = module.TILES
    with pytest.raises(ZeroDivisionError), using(module, {BLOCK: 64, LEFT: (4, 4), RIGHT: (8, 8)}):
        assert (module.BLOCK, module.TILES) == (64, {"left": (4, 4), "right": (8, 8)})
        raise ZeroDivisionError
    assert module.BLOCK == 32
    assert module.TILES is tiles == {"left": (1, 2), "right": (3, 3)}


def test_the_tuner_finds_the_best_of_each_constant_and_passes_over_what_fails(module: Any) -> None:
    def trial() -> float:
        if module.BLOCK == 64:
            raise RuntimeError("out of shared memory\nand more")
        left = {(1, 2): 1.0, (4, 4): 0.5}[module.TILES["left"]]
        return module.BLOCK / 16 + left + (0.0 if module.TILES["right"] == (3, 3) else -0.001)

    tuning = tune(module, (BLOCK, LEFT, RIGHT), trial, lambda: True)
    assert tuning.finished
    assert tuning.best == {BLOCK: 16, LEFT: (4, 4), RIGHT: (3, 3)}, "a gain within the noise is none"
    assert module.BLOCK == 32
    labels = ["as it is", "BLOCK", "BLOCK", "TILES[left]", "TILES[right]"]
    assert [one["constant"] for one in tuning.trials] == labels
    assert tuning.trials[2] == {"constant": "BLOCK", "value": 64, "failure": "out of shared memory"}
    assert json.loads(json.dumps(tuning.as_record()))["best"] == {
        "BLOCK": 16,
        "TILES[left]": [4, 4],
        "TILES[right]": [3, 3],
    }


def test_the_tuner_stops_when_time_is_over(module: Any) -> None:
    time_left = iter([True, False])
    tuning = tune(module, (BLOCK, LEFT), lambda: float(module.BLOCK), lambda: next(time_left))
    assert not tuning.finished
    assert tuning.best == {BLOCK: 16, LEFT: (1, 2)}
    assert len(tuning.trials) == 2


@pytest.mark.parametrize("knobs", [preset.LOOP_KNOBS, preset.MATRIX_KNOBS])
def test_the_knobs_are_constants_that_the_kernels_have(knobs: tuple[Knob, ...]) -> None:
    for knob in (preset.FAMILY, *knobs):
        value = knob.value(kernel_tuning)
        assert all(type(value) is type(candidate) for candidate in knob.candidates)
        assert not isinstance(value, tuple) or value in knob.candidates


@pytest.mark.parametrize(("of_loops", "expected"), [(0.5, "TILES[dcmha_probs]"), (2.0, "TURNS")])
def test_only_the_faster_kernels_are_tuned(of_loops: float, expected: str) -> None:
    def trial() -> float:
        return of_loops if kernel_tuning.FEWEST_HEADS > 32 else 1.0

    tuning = preset.tune_the_faster(trial, lambda: True)
    assert tuning.finished and (tuning.best[preset.FAMILY] > 32) == (of_loops < 1)
    tried = {one["constant"] for one in tuning.trials}
    assert expected in tried
    assert ("TURNS" in tried) != ("TILES[dcmha_probs]" in tried)


def test_the_trial_runs_the_contestant_with_the_constants_and_refuses_wrong_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Settings(torch.float32, torch.device("cpu"), None, 1, 0, 1, 0.01, False, ())
    trial = make_trial(settings, (("4x16@24", None), ("4x16@24", 8)), "chunked")
    assert trial() > 0
    monkeypatch.setattr(preset, "judge", lambda *_: SimpleNamespace(correct=False))
    with pytest.raises(ValueError, match="results are wrong"):
        trial()


@pytest.mark.slow
def test_the_triton_path_gives_the_same_with_all_constants_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    settings = Settings(torch.float32, torch.device("cpu"), None, 1, 0, 1, 0.01, False, ())
    monkeypatch.setattr(preset, "TRIAL_SAMPLES", 1)
    trial = make_trial(settings, (("2x16@40", 8),), "triton")
    knobs = (Knob("ROWS", (16,)), Knob("BLOCK", (8,)), Knob("TILES", ((8, 16, 4),), "dcmha_probs"))
    tuning = tune(kernel_tuning, knobs, trial, lambda: True)
    assert [one["constant"] for one in tuning.trials if one["seconds"] > 0] == [
        "as it is",
        "ROWS",
        "BLOCK",
        "TILES[dcmha_probs]",
    ]


class Clock:
    """Moves on only where a part takes time."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_parts_run_in_turn_with_the_tuned_constants_until_time_is_over(tmp_path: Path, module: Any) -> None:
    clock, seen = Clock(), []

    def run(arguments: BenchmarkArguments, folder: Path, end: float) -> bool:
        folder.mkdir()
        seen.append((folder.name, arguments.dtype, arguments.window, module.BLOCK, end))
        clock.now += 300
        return folder.name != "second"

    def find(arguments: BenchmarkArguments, end: float) -> Tuning:
        clock.now += 100
        assert end == 300 + preset.TUNING_SECONDS
        return Tuning({BLOCK: 64}, [], finished=True)

    parts = (Part("first", {"dtype": "float32"}), Part("second", {"window": 5}), Part("third", {}))
    right = run_preset(
        BenchmarkArguments(preset="gpu"), tmp_path, run, parts=parts, find=find, module=module, clock=clock
    )
    assert not right
    end = preset.SECONDS
    assert seen == [("first", "float32", None, 32, end), ("second", "bfloat16", 5, 64, end)]
    assert module.BLOCK == 32
    assert json.loads((tmp_path / "tuning.json").read_text()) == {"best": {"BLOCK": 64}, "finished": True, "trials": []}


def test_the_plan_covers_what_a_record_of_a_gpu_needs() -> None:
    planned = {part.name: part.options for part in GPU}
    assert planned["correctness"]["dtype"] == "float32"
    assert {"triton", "chunked", "eager"} <= set(planned["correctness"]["implementations"])
    for length in (2048, 4096, 8192):
        part = planned[f"attention-{length}"]
        shapes = [parse_shape(one) for one in part["shapes"]]
        assert {(one.length, one.width) for one in shapes} == {(length, 64), (length, 128)}
        assert "sdpa-flash" in part["implementations"]
        assert part["batch_size"] * length == preset.TOKENS
    assert "official-compiled" in planned["official"]["implementations"]
    assert planned["decode-16"]["batch_size"] == 16
    for name, length in (("training-405m", 2048), ("training-405m-4096", 4096)):
        assert planned[name]["layers"] == 24
        assert parse_shape(planned[name]["shapes"][0]).length == length


@pytest.mark.parametrize("part", GPU, ids=lambda part: part.name)
def test_every_part_is_made_of_arguments_and_names_that_exist(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(part.options) <= {field.name for field in fields(BenchmarkArguments)}
    arguments = options_of(part, BenchmarkArguments(preset="gpu"))
    assert arguments.device == "cuda"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    settings = read_settings(arguments)
    entries, _ = benchmark.choose(arguments, settings)
    assert {one.name for _, found in entries for one in found} == set(part.options["implementations"])
