"""What ends a process while it measures: it is left out, and everything else is measured."""

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases.benchmark import row_of, run_benchmark

from dynattn.modeling.ops.dcmha import attention as dcmha
from dynattn.scripts.benchmark.harness import comparison, interruptions
from dynattn.scripts.benchmark.harness.interruptions import Interruptions, check_device
from dynattn.scripts.benchmark.harness.process import DEVICE_LOST, DeviceLostError

OPTIONS = (
    "--quick",
    "--subjects",
    "attention",
    "--shapes",
    "2x8@16",
    "--implementations",
    "brittle",
    "chunked",
    "sdpa",
)


def fails_in_call(number: int, calls: list[int]) -> Callable[..., Any]:
    def attend(query: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        calls.append(query.shape[2])
        if len(calls) == number:
            raise RuntimeError("an illegal memory access was encountered\nand more")
        return dcmha.COMPOSING_IMPLEMENTATIONS["eager"](query, *arguments, **keywords)

    return attend


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every failure is that of the device."""

    def check(device: torch.device, failure: str) -> None:
        raise DeviceLostError(f"{failure}; the device is lost")

    monkeypatch.setattr(comparison, "check_device", check)


@pytest.mark.usefixtures("lost")
@pytest.mark.parametrize("number", [1, 4])
def test_a_second_process_goes_on_without_who_lost_the_device(
    number: int, tmp_path: Path, register: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []
    register("brittle", fails_in_call(number, calls))
    status, record = run_benchmark(tmp_path, *OPTIONS)
    assert status == DEVICE_LOST and record["cases"] == [] and "running" not in record
    assert "--resume goes on without it" in capsys.readouterr().out
    status, record = run_benchmark(tmp_path, *OPTIONS, "--resume")
    failure = "RuntimeError: an illegal memory access was encountered; the device is lost"
    assert status == 1 and row_of(record, "brittle")["failure"].endswith(failure)
    assert row_of(record, "chunked")["ratio"] > 0
    assert row_of(record, "brittle", "forward+backward")["ratio"] > 0
    assert "running" not in record


def test_who_fails_in_a_later_round_is_left_out_of_its_case(tmp_path: Path, register: Callable[..., None]) -> None:
    register("brittle", fails_in_call(4, []))
    status, record = run_benchmark(tmp_path, *OPTIONS)
    assert status == 1
    assert row_of(record, "brittle")["failure"] == "RuntimeError: an illegal memory access was encountered"
    assert row_of(record, "chunked")["ratio"] > 0 and row_of(record, "sdpa")["is_baseline"]
    assert row_of(record, "brittle", "forward+backward")["ratio"] > 0


def test_who_ends_two_processes_is_left_out(
    tmp_path: Path, register: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    register("brittle", attend)
    with monkeypatch.context() as crash:  # nobody cleans up
        crash.setattr(Interruptions, "stop", lambda _: None)
        for attempts in (1, 2):
            _, record = run_benchmark(tmp_path, *OPTIONS, "--resume")
            assert (record["running"]["name"], record["running"]["attempts"]) == ("brittle", attempts)
    _, record = run_benchmark(tmp_path, *OPTIONS, "--resume")
    assert record["interrupted"][0]["failure"] == "the process ended 2 times while this was measured"
    # The pass with gradients is another case; who ends a run by Ctrl-C is not to blame.
    assert record["cases"][0]["passes"] == "forward" and len(record["cases"]) == 1 and "running" not in record


def test_a_candidate_that_hangs_ends_the_process_with_its_name_in_the_record(
    tmp_path: Path,
    register: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[dict[str, Any]] = []
    timers: list[threading.Timer] = []

    class Timer(threading.Timer):
        """Runs out where the candidate hangs, and not before, however long the others take."""

        def start(self) -> None:
            timers.append(self)

    def leave(status: int) -> None:
        seen.append(json.loads((tmp_path / "record.json").read_text()) | {"status": status})

    def attend(query: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        run_out = threading.Thread(target=timers[-1].function)
        run_out.start()
        run_out.join()
        raise ValueError("late")

    register("brittle", attend)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(interruptions, "threading", SimpleNamespace(Timer=Timer))
    run_benchmark(tmp_path, *OPTIONS[:-1], "--budget", "400")
    assert seen[0]["status"] == DEVICE_LOST
    assert seen[0]["interrupted"][0]["name"] == "brittle"
    assert seen[0]["interrupted"][0]["failure"] == "it did not end within 1200 s"
    assert "brittle: it did not end within 1200 s; --resume goes on without it" in capsys.readouterr().out


def test_what_was_printed_is_written_before_a_hanging_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str | int] = []
    monkeypatch.setattr(os, "_exit", events.append)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(flush=lambda: events.append("flush")))
    timer = interruptions.end_when_hanging(0.01, events.append)
    assert timer is not None
    timer.join(timeout=10)
    assert events == ["it did not end within 0.03 s", "flush", DEVICE_LOST]


def test_a_device_that_answers_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error(*_: Any) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    check_device(torch.device("cuda"), "RuntimeError: out of memory")
    monkeypatch.setattr(torch.cuda, "synchronize", raise_error)
    check_device(torch.device("cpu"), "RuntimeError: out of memory")
    with pytest.raises(DeviceLostError, match=r"^RuntimeError: odd; the device is lost \(CUDA error: an illegal"):
        check_device(torch.device("cuda"), "RuntimeError: odd")
