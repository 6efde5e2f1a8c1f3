"""The GPU preset on a machine without one: what is tuned and planned, and what is left out for lack of time."""

import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dynattn.modeling.ops.dcmha.triton import tuning as kernel_tuning
from dynattn.scripts.benchmark import gpu_preset as preset
from dynattn.scripts.benchmark.arguments import BenchmarkArguments
from dynattn.scripts.benchmark.gpu_preset import GPU, PresetPart, make_trial, options_of, run_preset
from dynattn.scripts.benchmark.harness.process import DeviceLostError
from dynattn.scripts.benchmark.harness.settings import BenchmarkSettings, read_settings
from dynattn.scripts.benchmark.harness.shapes import parse_shape
from dynattn.scripts.benchmark.harness.tuning import TrialLog, TunableConstant, Tuning, tune
from dynattn.scripts.benchmark.subjects.selection import select


@pytest.mark.parametrize(
    "constants", [preset.HEAD_BY_HEAD_CONSTANTS, preset.TENSOR_CORE_CONSTANTS, preset.FUSED_CONSTANTS]
)
def test_the_tuned_constants_are_those_of_the_kernels(constants: tuple[TunableConstant, ...]) -> None:
    for constant in (preset.FAMILY, preset.FUSED, *constants):
        value = constant.current(kernel_tuning)
        assert all(type(value) is type(candidate) for candidate in constant.values)
        assert not isinstance(value, tuple) or value in constant.values or constant in preset.FUSED_CONSTANTS


@pytest.mark.parametrize("of_fused", [0.9, 1.1])
@pytest.mark.parametrize(("of_loops", "expected"), [(0.5, "TILES[dcmha_probs]"), (2.0, "TURNS")])
def test_only_the_fastest_kernels_are_tuned(of_loops: float, of_fused: float, expected: str) -> None:
    def trial() -> float:
        if kernel_tuning.FEWEST_HEADS > 32:
            return of_loops
        return of_fused if kernel_tuning.FUSES_FORWARD else 1.0

    tuning = preset.tune_the_faster(trial, lambda: True)
    is_fused = of_fused < 1 < of_loops
    assert tuning.finished and (tuning.best[preset.FAMILY] > 32) == (of_loops < 1)
    assert tuning.best[preset.FUSED] is is_fused
    tried = {one["constant"] for one in tuning.trials}
    assert expected in tried
    assert ("TURNS" in tried) != ("TILES[dcmha_probs]" in tried)
    assert ("FUSED_TILES_90[dcmha_fused_output]" in tried) is is_fused


def test_the_trial_runs_the_candidate_with_the_constants_and_refuses_wrong_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = BenchmarkSettings(torch.float32, torch.device("cpu"), None, 1, 0, 1, 0.01, False, ())
    trial = make_trial(settings, (("4x16@24", None), ("4x16@24", 8)), "chunked")
    assert trial() > 0
    monkeypatch.setattr(preset, "judge", lambda *_: SimpleNamespace(correct=False))
    with pytest.raises(ValueError, match="results are wrong"):
        trial()


@pytest.mark.slow
def test_the_triton_path_gives_the_same_with_all_constants_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    settings = BenchmarkSettings(torch.float32, torch.device("cpu"), None, 1, 0, 1, 0.01, False, ())
    monkeypatch.setattr(preset, "TRIAL_SAMPLES", 1)
    trial = make_trial(settings, (("2x16@40", 8),), "triton")
    tiles = TunableConstant("TILES", ((8, 16, 4),), "dcmha_probs")
    constants = (TunableConstant("ROWS", (16,)), TunableConstant("BLOCK", (8,)), tiles)
    tuning = tune(kernel_tuning, constants, trial, lambda: True)
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


def test_parts_run_in_turn_with_the_tuned_constants_until_time_is_over(tmp_path: Path) -> None:
    clock, seen, module = Clock(), [], SimpleNamespace(BLOCK=32)

    def run(arguments: BenchmarkArguments, folder: Path, end: float) -> bool:
        folder.mkdir()
        seen.append((folder.name, arguments.dtype, arguments.window, module.BLOCK, end))
        clock.now += 300
        return folder.name != "second"

    def find(arguments: BenchmarkArguments, end: float, log: TrialLog) -> Tuning:
        clock.now += 100
        assert end == 300 + preset.TUNING_SECONDS
        return Tuning({TunableConstant("BLOCK", (64,)): 64}, [], finished=True)

    parts = (PresetPart("first", {"dtype": "float32"}), PresetPart("second", {"window": 5}), PresetPart("third", {}))
    right = run_preset(
        BenchmarkArguments(preset="gpu"), tmp_path, run, parts=parts, find=find, module=module, clock=clock
    )
    assert not right
    end = preset.SECONDS
    assert seen == [("first", "float32", None, 32, end), ("second", "bfloat16", 5, 64, end)]
    assert module.BLOCK == 32
    assert json.loads((tmp_path / "tuning.json").read_text()) == {"best": {"BLOCK": 64}, "finished": True, "trials": []}


def test_a_second_command_goes_on_with_the_constants_that_the_first_one_found(tmp_path: Path) -> None:
    clock, module = Clock(), SimpleNamespace(BLOCK=32, TILES={"probs": (1, 2)})
    best = {TunableConstant("BLOCK", (64,)): 64, TunableConstant("TILES", (), "probs"): (3, 4)}
    seen = []

    def run(arguments: BenchmarkArguments, folder: Path, end: float) -> bool:
        clock.now += 0 if arguments.resume else preset.SECONDS
        seen.append((folder.name, module.BLOCK, module.TILES["probs"]))
        return True

    def find(arguments: BenchmarkArguments, end: float, log: TrialLog) -> Tuning:
        assert not arguments.resume
        return Tuning(best, [], finished=False)

    parts = (PresetPart("first", {}), PresetPart("second", {}))
    for resume in (False, True):
        arguments = BenchmarkArguments(preset="gpu", resume=resume)
        run_preset(arguments, tmp_path, run, parts=parts, find=find, module=module, clock=clock)
    assert seen == [("first", 32, (1, 2)), ("first", 32, (1, 2)), ("second", 64, (3, 4))]


def test_a_part_that_fails_as_a_whole_and_tuning_that_fails_cost_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def run(arguments: BenchmarkArguments, folder: Path, end: float) -> bool:
        seen.append(folder.name)
        if folder.name == "first":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return True

    def find(arguments: BenchmarkArguments, end: float, log: TrialLog) -> Tuning:
        raise RuntimeError("no reference")

    parts = (PresetPart("first", {}), PresetPart("second", {}))
    assert not run_preset(BenchmarkArguments(preset="gpu"), tmp_path, run, parts=parts, find=find)
    assert seen == ["first", "second"]
    shown = capsys.readouterr().out
    assert "the part first is left unfinished: CUDA out of memory" in shown and "nothing is tuned: no ref" in shown
    assert json.loads((tmp_path / "tuning.json").read_text()) == {"best": {}, "finished": False, "trials": []}


def test_a_process_that_goes_on_tunes_behind_the_last_trial(tmp_path: Path) -> None:
    arguments = BenchmarkArguments(preset="gpu", resume=True)

    def find(arguments: BenchmarkArguments, end: float, log: TrialLog) -> Tuning:
        log.run("BLOCK", 64, lambda: 1.0)
        log.run("BLOCK", 128, lambda: process_ends())
        return Tuning({}, log.made, finished=True)

    def process_ends() -> float:
        raise DeviceLostError("gone")

    parts = (PresetPart("first", {}),)
    with pytest.raises(DeviceLostError):
        run_preset(arguments, tmp_path, lambda *_: True, parts=parts, find=find)
    run_preset(arguments, tmp_path, lambda *_: True, parts=parts, find=find)
    trials = json.loads((tmp_path / "tuning.json").read_text())["trials"]
    assert [one.get("seconds", one.get("failure")) for one in trials] == [1.0, "gone"]


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
def test_every_part_is_made_of_arguments_and_names_that_exist(
    part: PresetPart, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(part.options) <= {field.name for field in fields(BenchmarkArguments)}
    arguments = options_of(part, BenchmarkArguments(preset="gpu"))
    assert arguments.device == "cuda"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    settings = read_settings(arguments)
    selection, _ = select(arguments, settings)
    assert {one.name for _, found in selection for one in found} == set(part.options["implementations"])
