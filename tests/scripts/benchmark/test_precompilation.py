"""What the tuner tries is compiled before, for a GPU that this process does not use."""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dynattn.scripts.benchmark import gpu_tuning, precompilation
from dynattn.scripts.benchmark.arguments import BenchmarkArguments
from dynattn.scripts.benchmark.harness.shapes import parse_shape
from dynattn.scripts.benchmark.precompilation import Call, Precompilation, Target
from dynattn.scripts.common.signals import SIGNALS
from dynattn.scripts.common.workers import end_with_parent

PROGRAM = """
import torch
from dynattn.scripts.benchmark.gpu_tuning import FAMILY, TENSOR_CORE_CONSTANTS
from dynattn.scripts.benchmark.harness.shapes import parse_shape
from dynattn.scripts.benchmark.precompilation import Call, Target, compile_trial

call = Call(parse_shape("16x16@64"), 1, None, torch.bfloat16)
(tile,) = (one for one in TENSOR_CORE_CONSTANTS if one.label == "MATRIX_TILES_16[dcmha_matrix_probs]")
for trial in ({}, {tile: (16, 16, 4, 1)}, {tile: (16, 16, 4, 1)}):
    compile_trial(trial, call, Target(90, 232_448))
"""


@pytest.mark.slow
def test_a_trial_leaves_its_kernels_on_disk(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True)
    kernels = Counter(path.stem for path in tmp_path.glob("*/*.cubin"))
    assert kernels.pop("dcmha_matrix_probs") == 2
    assert kernels.keys() >= {"dcmha_matrix_statistics", "dcmha_matrix_backward_post", "dcmha_matrix_backward_pre"}
    assert kernels["dcmha_matrix_backward_pre"] == 1


def test_the_processes_end_with_the_one_that_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {}
    monkeypatch.setattr(precompilation, "ProcessPoolExecutor", lambda _, **options: given.update(options))
    Precompilation([], [], Target(90, 232_448))
    assert given["initializer"] is end_with_parent


@pytest.mark.parametrize("failure", [None, KeyboardInterrupt])
def test_processes_that_are_started_hold_signals_back_and_end_with_the_block(
    failure: type[BaseException] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pool:
        def submit(self, *_: object) -> None:
            events.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= {*SIGNALS})

        def shutdown(self, **_: object) -> None:
            events.append("shutdown")

    events: list[bool | str] = []
    worker = SimpleNamespace(terminate=lambda: events.append("terminate"))
    monkeypatch.setattr(precompilation, "ProcessPoolExecutor", lambda *_, **__: Pool())
    monkeypatch.setattr(precompilation, "active_children", lambda: [worker])
    call = Call(parse_shape("16x16@64"), 1, None, torch.bfloat16)
    Precompilation([{}], [call], Target(90, 232_448)).__exit__(failure, None, None)
    assert events == [True, *(["terminate"] if failure else []), "shutdown"]


def test_the_trials_of_the_tuner_are_compiled_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def note(self: Precompilation, *arguments: object) -> None:
        given.append(arguments)

    monkeypatch.setattr(Precompilation, "__init__", note)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    properties = SimpleNamespace(shared_memory_per_block=49_152, shared_memory_per_block_optin=232_448)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    gpu_tuning.compile_trials(BenchmarkArguments(device="cuda"))
    ((trials, calls, target),) = given
    assert target == (90, 232_448) and len(calls) == len(gpu_tuning.TUNED_SHAPES)
    assert {} in trials
    for constant in (gpu_tuning.FAMILY, *gpu_tuning.TENSOR_CORE_CONSTANTS):
        assert {trial[constant] for trial in trials if constant in trial} == set(constant.values)
