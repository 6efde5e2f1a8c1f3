"""What a number was measured on: versions and hardware, for records, cards and results."""

import os
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    *("dynattn", "torch", "transformers", "accelerate", "datasets", "evaluate", "lm_eval", "tokenizers"),
    *("torchao", "bitsandbytes", "deepspeed"),
)


def versions(*others: str) -> dict[str, str]:
    """Versions of Python and of the installed packages that decide a run's numbers, and of `others` by name."""
    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *others):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    # Wheels for a GPU do not always say in their metadata which build they are ("+cu130").
    return found | {"torch": str(torch.__version__)}


def hardware(device: torch.device, processes: int = 1) -> str:
    """The accelerators, or the processor, that a run uses."""
    if device.type == "cuda":
        return f"{processes} x {torch.cuda.get_device_name(device)}"
    return f"{os.cpu_count()} cores of {_processor_name()}"


def distinct(values: Iterable[Any]) -> list[Any]:
    """Each value once, in the order of their first occurrence; values need not be hashable.

    A record of several runs lists their hardware and versions so, because normally all of them share a single one.
    """
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _processor_name() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
