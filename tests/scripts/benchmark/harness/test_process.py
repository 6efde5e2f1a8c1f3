"""The process starts anew only if it has to."""

import os
import sys

import pytest

from dynattn.scripts.benchmark.harness import process


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
