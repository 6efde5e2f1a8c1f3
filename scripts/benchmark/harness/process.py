"""The process that measures: its environment, and the processes that continue after it.

Nothing here imports PyTorch: the process is restarted before anything slow is imported.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from ...common.errors import UserError

# By default glibc returns large blocks to the system at once. Page faults on allocating them again would then dominate
# the time of an implementation with large temporaries.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TRIM_THRESHOLD_": "8000000000"}
THREADS = "OMP_NUM_THREADS"
# `dynattn benchmark` in a new process.
COMMAND = (sys.executable, "-m", "dynattn.scripts.cli", "benchmark")
# The exit status of a process whose work another process has to continue.
DEVICE_LOST = 75
# Environment variables of the processes of a preset: when the last case may begin, and whether another came before.
END, GOES_ON = "DYNATTN_BENCHMARK_END", "DYNATTN_BENCHMARK_GOES_ON"


class DeviceLostError(Exception):
    """The device fails every further call of this process; the message is the failure of what was measured."""


def pin_process(argv: Sequence[str], threads: int | None) -> None:
    """Replaces this process by a new `dynattn benchmark` unless the environment already holds the settings.

    The allocator and OpenMP read them only when a process starts. What the user has set stays, except for a number of
    threads that contradicts `threads`.

    Raises:
        UserError: the number of threads in the environment is not a positive number.
    """
    wanted = {**ALLOCATOR, **os.environ}
    wanted[THREADS] = str(threads) if threads is not None else wanted.get(THREADS, "").strip() or "1"
    threads_of(wanted[THREADS])
    if wanted != dict(os.environ):
        sys.stdout.flush()
        os.execve(sys.executable, [*COMMAND, *argv], wanted)


def run_workers(argv: Sequence[str], seconds: float) -> int:
    """Runs `dynattn benchmark` in a new process, and in another one each time that one loses its device or crashes.

    Returns:
        The exit status of the last process: the first that finishes, or that has no time left.
    """
    end = time.monotonic() + seconds
    environment = {**os.environ, END: repr(end)}
    while True:
        status = subprocess.run([*COMMAND, *argv], env=environment, check=False).returncode
        if (status != DEVICE_LOST and status >= 0) or time.monotonic() >= end:
            return status
        print(f"\nthe process ended with status {status}; another one goes on", flush=True)
        environment[GOES_ON] = "1"


def pinned_threads() -> int:
    """The number of threads that the pinned environment asks for."""
    return threads_of(os.environ[THREADS])


def threads_of(value: str) -> int:
    """What OpenMP takes of its variable: the first of the numbers, which are for regions inside one another.

    Raises:
        UserError: it is no positive number.
    """
    first = value.partition(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        raise UserError(f"{THREADS}={value!r} must be a positive number of threads; set it so, or give --threads")
    return int(first)
