"""Training that is killed, runs out of disk or meets another run: resuming gives what the undisturbed run gives."""

import functools
import hashlib
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from safetensors.torch import load_file

from dynattn.scripts.pretrain.outputs.metrics import read_metrics

from ..commands import PRETRAIN, Ended, as_options, checkpoints, expect_one_line, run_command
from ..harness import Case, Kind, expect, in_child

# Events of a run that change its folder; an undisturbed run has a few hundred.
EVENTS = 450
CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "os.truncate")
SECONDS = 150
TIMED = ("memory", "seconds", "per_second", "mfu")


def generate(random: Random) -> Case:
    fault = random.choice(("killed", "killed", "killed", "killed late", "disk is full", "limited files", "two at once"))
    return {
        "class": fault,
        "event": random.randrange(1, EVENTS),
        "again": random.choice((None, random.randrange(1, EVENTS))),
    }


def check(case: Case) -> None:
    expected = undisturbed()
    with tempfile.TemporaryDirectory(prefix="dynattn-fuzz-") as name:
        output = Path(name) / "run"
        if case["class"] == "two at once":
            run_two(output)
        else:
            for event in (case["event"], case["again"]):
                if event is not None:
                    disturb(case["class"], event, output)
        ended = run_command(command(output), SECONDS)
        if not (output / "result.json").exists() or not (output / "model").exists():
            expect(False, f"{case['class']}: cannot be resumed: {ended.exception or ended.errors[-300:]!r}")
        finished = ended.status == 2 and "already holds a finished model" in ended.errors
        if not finished:
            expect_one_line(ended, allowed=(0,))
        observed = summary(output)
        for part, value in expected.items():
            expect(observed[part] == value, f"{case['class']}: {part} is not what the undisturbed run leaves")


def command(output: Path) -> list[str]:
    values = {**PRETRAIN, "dataset": f"{checkpoints()}/text.jsonl", "output": str(output)}
    return ["pretrain", *as_options(values)]


@functools.cache
def undisturbed() -> dict[str, Any]:
    """What every run must leave; from a run of its own."""
    with tempfile.TemporaryDirectory(prefix="dynattn-fuzz-") as name:
        ended = run_command(command(Path(name) / "run"), SECONDS)
        assert ended.status == 0, ended
        return summary(Path(name) / "run")


def summary(output: Path) -> dict[str, Any]:
    """The lines of metrics without times, checksums of all tensors, and which files there are.

    Checkpoints that were damaged and given up are put aside, and count for nothing.
    """
    lines = [
        {name: value for name, value in line.items() if not any(word in name for word in TIMED)}
        for line in read_metrics(output / "metrics.jsonl")
    ]
    weights = {
        f"{path.relative_to(output)} {name}": hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for path in sorted(output.rglob("*.safetensors"))
        if not any(part.startswith("abandoned-") for part in path.parts)
        for name, tensor in load_file(path).items()
    }
    return {"curve": lines, "weights": weights, "folder": sorted(path.name for path in output.iterdir())}


def disturb(fault: str, event: int, output: Path) -> None:
    """Runs until the fault; a process that is killed may leave anything, one that is told must say so in one line."""
    size = 1 << (10 + event % 8)
    try:
        ended = run_command(command(output), SECONDS, functools.partial(strike, fault, event, output, size))
    except EOFError:
        return
    if not (ended.status == 2 and "already holds a finished" in ended.errors):
        expect_one_line(ended)


def strike(fault: str, event: int, output: Path, size: int) -> None:
    """Makes this process suffer a fault at the n-th change of its folder, or no file be longer than `size` bytes."""
    if fault == "limited files":
        limit_files(size)
    else:
        at_event(event, output, {"killed": kill, "killed late": kill_soon, "disk is full": refuse}[fault])


def at_event(number: int, output: Path, act: Callable[[], None]) -> None:
    """Calls `act` at the n-th change of the run's folder, and at all later ones."""
    seen = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in CHANGES or not arguments or str(output) not in str(arguments[0]):
            return
        if event == "open" and not (arguments[1] and set(str(arguments[1])) & set("wax+")):
            return
        seen += 1
        if seen >= number:
            act()

    sys.addaudithook(watch)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_soon() -> None:
    """In the middle of what comes next, such as a write by native code."""
    signal.setitimer(signal.ITIMER_REAL, 0.002)


def refuse() -> None:
    raise OSError(28, "No space left on device")


def limit_files(size: int) -> None:
    """No file can grow beyond `size` bytes, as on a disk that is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def run_two(output: Path) -> None:
    """Two runs begin in one folder at the same time: one of them may be refused, none may fail otherwise."""
    endings: list[Ended] = []
    with in_child(lambda tell: tell(run_command(command(output), SECONDS))) as first:
        endings.append(run_command(command(output), SECONDS))
        endings.append(first.hear(SECONDS))
    for ended in endings:
        expect_one_line(ended)
    expect(any(ended.status == 0 for ended in endings), "two at once: neither run succeeds")


KIND = Kind("faults", generate, check, lambda: (checkpoints(), undisturbed()), fast=1, seconds=4 * SECONDS, batch=4)
