"""The process starts anew only if it has to."""

import os
import subprocess
import sys
import time

import pytest

from dynattn.scripts.benchmark.harness import process
from dynattn.scripts.common.errors import UserError


def test_the_process_starts_anew_only_where_settings_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda _, command, environment: started.append((command, environment)))
    process.pin_process(["--quick"], threads=1)
    assert not started
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "12345")
    process.pin_process(["--quick"], threads=None)
    command, environment = started.pop()
    assert command == [sys.executable, "-m", "dynattn.scripts.cli", "benchmark", "--quick"]
    assert environment["MALLOC_TRIM_THRESHOLD_"] == process.ALLOCATOR["MALLOC_TRIM_THRESHOLD_"]
    assert environment["MALLOC_MMAP_THRESHOLD_"] == "12345"
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "8")
    process.pin_process([], threads=2)
    assert started.pop()[1][process.THREADS] == "2"
    assert not started


def test_threads_of_the_environment_are_those_that_openmp_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list is for regions inside one another, and an empty variable is none."""
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given[2]))
    monkeypatch.setenv(process.THREADS, " 2,1")
    process.pin_process([], threads=None)
    assert process.pinned_threads() == 2
    monkeypatch.setenv(process.THREADS, "")
    process.pin_process([], threads=None)
    assert [variables[process.THREADS] for variables in started] == ["2,1", "1"]


@pytest.mark.parametrize("value", ["many", "0", "-1", "2.5", ",2"])
def test_threads_that_are_no_number_are_refused_unless_others_are_given(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given[2]))
    monkeypatch.setenv(process.THREADS, value)
    with pytest.raises(UserError, match=f"OMP_NUM_THREADS='{value}' must be a positive number of threads"):
        process.pin_process([], threads=None)
    process.pin_process([], threads=3)
    assert [variables[process.THREADS] for variables in started] == ["3"]


def test_another_process_goes_on_for_one_that_crashes_or_loses_its_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses, seen = [process.DEVICE_LOST, -11, 1, 0], []

    def run(command: list[str], *, env: dict[str, str], check: bool) -> subprocess.CompletedProcess[str]:
        seen.append((command[4:], env.get(process.GOES_ON), float(env[process.END])))
        return subprocess.CompletedProcess(command, statuses.pop(0))

    monkeypatch.setattr(subprocess, "run", run)
    before = time.monotonic()
    assert process.run_workers(["--preset", "gpu"], 100.0) == 1
    assert [(argv, goes_on) for argv, goes_on, _ in seen] == [(["--preset", "gpu"], one) for one in (None, "1", "1")]
    assert len({end for *_, end in seen}) == 1 and 100 <= seen[0][2] - before < 200
    assert capsys.readouterr().out.count("another one goes on") == 2
    statuses[:] = [process.DEVICE_LOST, 0]
    assert process.run_workers([], -1.0) == process.DEVICE_LOST, "no time is left"
