"""What a record says about its command, and about the GPU that was measured."""

import json
import subprocess
from types import SimpleNamespace

import pytest
import torch

from dynattn.modeling.ops.dcmha.triton import tuning as kernel_tuning
from dynattn.scripts.benchmark.harness.metadata import gpu_clocks, kernel_constants, run_metadata
from dynattn.scripts.benchmark.harness.tuning import TunableConstant, override_constants
from dynattn.scripts.common.commands import IMPORTS


def test_the_clocks_are_those_of_the_gpu_that_pytorch_numbers_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """With CUDA_VISIBLE_DEVICES the device 0 of PyTorch may be any GPU of the machine."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(stdout="345 MHz, 1980 MHz, 3201 MHz, 700.00 W, 580.159.03\n")

    properties = SimpleNamespace(uuid="ffc79498-8ff3-c2dc-3b0d-fafd804516ae")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(subprocess, "run", run)
    clocks = gpu_clocks(torch.device("cuda"))
    assert clocks is not None and clocks["clocks.max.sm"] == "1980 MHz" and clocks["driver_version"] == "580.159.03"
    assert commands[0][-1] == "--id=GPU-ffc79498-8ff3-c2dc-3b0d-fafd804516ae"
    assert gpu_clocks(torch.device("cpu")) is None


def test_a_record_has_the_constants_that_the_tuner_has_set() -> None:
    assert kernel_constants()["LARGEST_MAP"] == kernel_tuning.LARGEST_MAP
    with override_constants(kernel_tuning, {TunableConstant("LARGEST_MAP", ()): 5}):
        assert json.loads(json.dumps(kernel_constants()))["LARGEST_MAP"] == 5


def test_the_command_names_modules_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IMPORTS, "mine,other")
    command = run_metadata(["--quick"], torch.device("cpu"))["command"]
    assert command == ["dynattn", "benchmark", "--import", "mine", "--import", "other", "--quick"]
