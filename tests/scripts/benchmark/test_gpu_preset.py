"""The GPU preset on a machine without one: what is planned, and what is left out for lack of time."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases.clock import Clock

from dynattn.scripts.benchmark import gpu_preset as preset
from dynattn.scripts.benchmark.arguments import BenchmarkArguments
from dynattn.scripts.benchmark.gpu_preset import GPU, PresetPart, forget_parts, options_of, run_preset
from dynattn.scripts.benchmark.harness.process import DeviceLostError
from dynattn.scripts.benchmark.harness.settings import read_settings
from dynattn.scripts.benchmark.harness.shapes import parse_shape
from dynattn.scripts.benchmark.harness.tuning import TrialLog, TunableConstant, Tuning
from dynattn.scripts.benchmark.subjects.selection import select
from dynattn.scripts.common.atomic_file import write_json
from dynattn.scripts.common.errors import UserError


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the parts, how constants are found and in which module, and if need be the clock."""

    def replace(
        *parts: PresetPart,
        find: Callable[..., Tuning],
        module: SimpleNamespace | None = None,
        clock: Clock | None = None,
    ) -> None:
        monkeypatch.setattr(preset, "GPU", parts)
        monkeypatch.setattr(preset, "find_constants", find)
        monkeypatch.setattr(preset, "compile_trials", lambda _: nullcontext())
        monkeypatch.setattr(preset, "kernel_tuning", module)
        if clock is not None:
            monkeypatch.setattr(preset, "time", clock)

    return replace


def test_parts_run_in_turn_with_the_tuned_constants_until_time_is_over(
    tmp_path: Path, plan: Callable[..., None]
) -> None:
    clock, seen, module = Clock(), [], SimpleNamespace(BLOCK=32)

    def run(arguments: BenchmarkArguments, folder: Path, end: float) -> bool:
        folder.mkdir()
        seen.append((folder.name, arguments.dtype, arguments.window, module.BLOCK, end))
        clock.now += 300
        return folder.name != "second"

    def find(arguments: BenchmarkArguments, end: float, log: TrialLog, compiling: None) -> Tuning:
        clock.now += 100
        assert end == 300 + preset.TUNING_SECONDS
        return Tuning({TunableConstant("BLOCK", (64,)): 64}, [], finished=True)

    parts = (PresetPart("first", {"dtype": "float32"}), PresetPart("second", {"window": 5}), PresetPart("third", {}))
    plan(*parts, find=find, module=module, clock=clock)
    end = preset.SECONDS
    assert not run_preset(BenchmarkArguments(preset="gpu"), tmp_path, run, end)
    assert seen == [("first", "float32", None, 32, end), ("second", "bfloat16", 5, 64, end)]
    assert module.BLOCK == 32
    assert json.loads((tmp_path / "tuning.json").read_text()) == {"best": {"BLOCK": 64}, "finished": True, "trials": []}


def test_nothing_is_compiled_ahead_any_more_while_the_tuned_parts_are_measured(
    tmp_path: Path, plan: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    @contextmanager
    def compile_trials(_: BenchmarkArguments) -> Iterator[None]:
        events.append("compiling")
        yield
        events.append("closed")

    def find(*_: object) -> Tuning:
        events.append("tuned")
        return Tuning({}, [], finished=True)

    def run(_: BenchmarkArguments, folder: Path, end: float) -> bool:
        events.append(folder.name)
        return True

    plan(PresetPart("first", {}), PresetPart("second", {}), find=find)
    monkeypatch.setattr(preset, "compile_trials", compile_trials)
    run_preset(BenchmarkArguments(preset="gpu"), tmp_path, run, math.inf)
    assert events == ["compiling", "first", "tuned", "closed", "second"]


def test_a_second_command_goes_on_with_the_constants_that_the_first_one_found(
    tmp_path: Path, plan: Callable[..., None]
) -> None:
    clock, module = Clock(), SimpleNamespace(BLOCK=32, TILES={"probs": (1, 2)})
    best = {TunableConstant("BLOCK", (64,)): 64, TunableConstant("TILES", (), "probs"): (3, 4)}
    seen = []

    def run(arguments: BenchmarkArguments, folder: Path, end: float) -> bool:
        clock.now += 0 if arguments.resume else preset.SECONDS
        seen.append((folder.name, module.BLOCK, module.TILES["probs"]))
        return True

    def find(arguments: BenchmarkArguments, end: float, log: TrialLog, compiling: None) -> Tuning:
        assert not arguments.resume
        return Tuning(best, [], finished=False)

    plan(PresetPart("first", {}), PresetPart("second", {}), find=find, module=module, clock=clock)
    for resume in (False, True):
        arguments = BenchmarkArguments(preset="gpu", resume=resume)
        run_preset(arguments, tmp_path, run, end=clock.now + preset.SECONDS)
    assert seen == [("first", 32, (1, 2)), ("first", 32, (1, 2)), ("second", 64, (3, 4))]


@pytest.mark.parametrize("options", [{"resume": True}, {"parts": ["second"]}], ids=["resumed", "parts"])
def test_a_damaged_tuning_is_told_in_one_line(
    options: dict[str, Any], tmp_path: Path, plan: Callable[..., None]
) -> None:
    plan(PresetPart("first", {}), PresetPart("second", {}), find=lambda *_: None, module=SimpleNamespace())
    (tmp_path / preset.TUNING).write_text('{"trials": [')
    with pytest.raises(UserError, match=r"tuning\.json is damaged: .*; remove it to tune again"):
        run_preset(BenchmarkArguments(preset="gpu", **options), tmp_path, lambda *_: True, math.inf)


def test_chosen_parts_run_without_tuning_with_the_constants_that_were_found(
    tmp_path: Path, plan: Callable[..., None]
) -> None:
    module, seen = SimpleNamespace(BLOCK=32), []

    def run(arguments: BenchmarkArguments, folder: Path, end: float) -> bool:
        seen.append((folder.name, module.BLOCK))
        return True

    def find(*_: object) -> Tuning:
        raise AssertionError("tuned")

    plan(PresetPart("first", {}), PresetPart("second", {}), PresetPart("third", {}), find=find, module=module)
    arguments = BenchmarkArguments(preset="gpu", parts=["third", "second"])
    assert run_preset(arguments, tmp_path, run, math.inf)
    found = Tuning({TunableConstant("BLOCK", (64,)): 64}, [], finished=True)
    write_json(tmp_path / preset.TUNING, found.as_record())
    assert run_preset(arguments, tmp_path, run, math.inf)
    assert seen == [("second", 32), ("third", 32), ("second", 64), ("third", 64)]


def test_overwriting_a_part_keeps_the_others_and_the_constants(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("decode-1/record.json", "official/record.json", preset.TUNING)]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.touch()
    forget_parts(BenchmarkArguments(preset="gpu", parts=["official"]), tmp_path)
    assert [file.exists() for file in files] == [True, False, True]
    forget_parts(BenchmarkArguments(preset="gpu"), tmp_path)
    assert [file.exists() for file in files] == [False, False, False]


def test_a_part_that_fails_as_a_whole_and_tuning_that_fails_cost_nothing_else(
    tmp_path: Path, plan: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def run(arguments: BenchmarkArguments, folder: Path, end: float) -> bool:
        seen.append(folder.name)
        if folder.name == "first":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return True

    def find(arguments: BenchmarkArguments, end: float, log: TrialLog, compiling: None) -> Tuning:
        raise RuntimeError("no reference")

    plan(PresetPart("first", {}), PresetPart("second", {}), find=find)
    assert not run_preset(BenchmarkArguments(preset="gpu"), tmp_path, run, math.inf)
    assert seen == ["first", "second"]
    shown = capsys.readouterr().out
    assert "the part first is left unfinished: CUDA out of memory" in shown and "nothing is tuned: no ref" in shown
    assert json.loads((tmp_path / "tuning.json").read_text()) == {"best": {}, "finished": False, "trials": []}


def test_a_process_that_goes_on_tunes_behind_the_last_trial(tmp_path: Path, plan: Callable[..., None]) -> None:
    arguments = BenchmarkArguments(preset="gpu", resume=True)

    def find(arguments: BenchmarkArguments, end: float, log: TrialLog, compiling: None) -> Tuning:
        log.run("BLOCK", 64, lambda: 1.0)
        log.run("BLOCK", 128, lambda: process_ends())
        return Tuning({}, log.made, finished=True)

    def process_ends() -> float:
        raise DeviceLostError("gone")

    plan(PresetPart("first", {}), find=find)
    with pytest.raises(DeviceLostError):
        run_preset(arguments, tmp_path, lambda *_: True, math.inf)
    run_preset(arguments, tmp_path, lambda *_: True, math.inf)
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
