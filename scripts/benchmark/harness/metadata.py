"""What a record says about its run: command, versions, hardware and load."""

import os
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import torch

from dynattn.modeling.ops.dcmha.triton import tuning as kernel_tuning

from ...common.commands import import_words
from ...common.environment import hardware, source_commit, versions
from .process import ALLOCATOR


def run_metadata(argv: Sequence[str], device: torch.device) -> dict[str, Any]:
    """Everything that a reader needs to judge the measurements, or to repeat them."""
    is_gpu = device.type == "cuda"
    return {
        "command": ["dynattn", "benchmark", *import_words(), *argv],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": source_commit(),
        "versions": versions(*(["triton"] if is_gpu else [])),
        "hardware": hardware(device),
        "clocks": gpu_clocks(device),
        "threads": torch.get_num_threads(),
        "allocator": {name: os.environ.get(name) for name in ALLOCATOR},
        "load_average": os.getloadavg(),
        **({"kernel_constants": kernel_constants()} if is_gpu else {}),
    }


def kernel_constants() -> dict[str, Any]:
    """The constants of the Triton path with which kernels run now, tuned or not."""
    return {name: value for name, value in vars(kernel_tuning).items() if name.isupper() and name != "WARP"}


def gpu_clocks(device: torch.device) -> dict[str, str] | None:
    """A GPU's clocks, power limit and driver, as `nvidia-smi` reports them; None for a CPU, or without that tool."""
    if device.type != "cuda":
        return None
    names = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "driver_version")
    # The tool does not know CUDA_VISIBLE_DEVICES, by which PyTorch numbers devices.
    gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", f"--id={gpu}"]
    try:
        values = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return dict(zip(names, (value.strip() for value in values.split(",")), strict=True))
