"""A process whose threads and allocator are known, and what else the numbers depend on."""

import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ...common.environment import hardware, versions

# By default glibc hands large blocks back to the system at once, and the page faults of getting them again would be
# most of what an implementation with large temporaries is timed for.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TRIM_THRESHOLD_": "8000000000"}
THREADS = "OMP_NUM_THREADS"


def pin_process(argv: Sequence[str], threads: int | None) -> None:
    """Starts `dynattn benchmark` anew in this process's place unless the environment already holds the settings.

    The allocator and OpenMP read them only when a process starts. What the user has set stays, except for the number of
    threads where it contradicts `threads`.
    """
    wanted = {**ALLOCATOR, THREADS: "1", **os.environ}
    if threads is not None:
        wanted[THREADS] = str(threads)
    if wanted != dict(os.environ):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, "-m", "dynattn.scripts.cli", "benchmark", *argv], wanted)
    torch.set_num_threads(int(wanted[THREADS]))


def circumstances(argv: Sequence[str], device: torch.device) -> dict[str, Any]:
    """What a reader needs to judge, or to repeat, the numbers."""
    return {
        "command": ["dynattn", "benchmark", *argv],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": source_commit(),
        "versions": versions(),
        "hardware": hardware(device),
        "clocks": clocks(device),
        "threads": torch.get_num_threads(),
        "allocator": {name: os.environ.get(name) for name in ALLOCATOR},
        "load_average": os.getloadavg(),
    }


def clocks(device: torch.device) -> dict[str, str] | None:
    """A GPU's clocks, power limit and driver as its own tool tells them; None on a processor, or without the tool."""
    if device.type != "cuda":
        return None
    names = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "driver_version")
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", f"--id={device.index or 0}"]
    try:
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return dict(zip(names, (value.strip() for value in told.split(",")), strict=True))


def source_commit() -> str | None:
    """The commit that this file is part of, marked `-dirty` where the checkout differs; None outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    tracked = subprocess.run([*git, "ls-files", "--error-unmatch", __file__], check=False, capture_output=True)
    if tracked.returncode:
        return None
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return subprocess.run(describe, check=True, capture_output=True, text=True).stdout.strip()
