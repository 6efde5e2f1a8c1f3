"""What the tests of the benchmark share: a pinned process, short samples, a machine of known speed."""

from collections.abc import Callable
from typing import Any

import pytest

from dynattn.modeling.ops.dcmha import attention as dcmha
from dynattn.scripts.benchmark import job
from dynattn.scripts.benchmark.harness import process, settings
from dynattn.scripts.benchmark.report import record

Register = Callable[[str, Callable[..., Any]], None]


@pytest.fixture(autouse=True)
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a process that the command has restarted."""
    for name, value in {**process.ALLOCATOR, process.THREADS: "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("DYNATTN_COMPILE", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here depends on how accurate times are."""
    for name in ("SAMPLE_SECONDS", "QUICK_SAMPLE_SECONDS"):
        monkeypatch.setattr(settings, name, 1e-4)


@pytest.fixture
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares a test the measurement of the machine."""
    monkeypatch.setattr(job, "gemm_rate", lambda *_: 1e11)
    monkeypatch.setattr(job, "copy_rate", lambda *_: 1e10)


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "draw_plots", lambda *_: None)


@pytest.fixture
def register(known_machine: None, no_plots: None, monkeypatch: pytest.MonkeyPatch) -> Register:
    """Puts an implementation into the op's registry for one test, which measures no machine and draws no plot."""

    def put(name: str, attend: Callable[..., Any]) -> None:
        monkeypatch.setitem(dcmha.COMPOSING_IMPLEMENTATIONS, name, attend)
        monkeypatch.setitem(dcmha.IMPLEMENTATIONS, name, attend)

    return put
