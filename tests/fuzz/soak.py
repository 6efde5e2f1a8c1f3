"""A run that is disturbed again and again, and has to end where the undisturbed one ends.

    python -m tests.fuzz.soak --faults 100 --worlds 1 --seed 0 --record FILE.json

Each fault either ends the run while it changes its folder (kill -9, a full disk), or damages its newest checkpoint
between two processes (torn and flipped files). Then the same command goes on, with the next number of processes in
`--worlds`. Nobody helps it: `--resume intact` has to find its way.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from accelerate.state import AcceleratorState

from dynattn.scripts.common.atomic_file import write_json
from dynattn.scripts.common.environment import hardware, versions
from dynattn.scripts.pretrain.outputs.checkpoint import list_checkpoints
from tests.cases.processes import free_port, torchrun_environment

from .commands import PRETRAIN, Ended, as_options, run_here
from .harness import Child, in_child
from .kinds.faults import strike, summary

UPDATES = 240
SEQUENCES = 4
# Changes of the folder that the process of one fault makes at most before it is disturbed: the first process, which
# writes metrics and names checkpoints, and any other, which writes its share of checkpoints alone.
EVENTS, EVENTS_OF_OTHERS = 160, 10
SECONDS = 600
# After one process of several has ended, the others notice, or are ended as torchrun would.
GRACE = 10
RUN = {
    **PRETRAIN,
    "max_steps": str(UPDATES),
    "learning_rate": "1e-3",
    "eval_every": str(UPDATES // 4),
    "log_every": "1",
    "save_every": "2",
    "keep_checkpoints": "3",
    "resume": "intact",
}
ENDING = ("killed", "killed late", "disk is full", "limited files")
DAMAGING = ("torn", "flipped", "lost")


def main(argv: Sequence[str] | None = None) -> int:
    """Soaks, prints what was done, and returns 0 if the disturbed run is the undisturbed one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path)
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="dynattn-soak-") as folder:
        record = soak(Path(folder), given.faults, given.worlds, given.seed)
    print(json.dumps(record, indent=2))
    if given.record:
        write_json(given.record, record)
    return 0 if record["same"] else 1


def soak(folder: Path, faults: int, worlds: Sequence[int], seed: int) -> dict[str, Any]:
    """Compares a run with `faults` faults, whose processes are `worlds` in turn, with an undisturbed one."""
    started, random = time.monotonic(), Random(seed)
    corpus = folder / "text.jsonl"
    lines = [json.dumps({"text": f"The number {n} is followed by {n + 1}. " * (1 + n % 3)}) for n in range(40)]
    corpus.write_text("\n".join(lines))
    straight, disturbed = folder / "straight", folder / "disturbed"
    finish(straight, corpus, 1)
    done: Counter[str] = Counter()
    is_damaged = False
    for number in range(faults):
        if (disturbed / "model").exists():
            break
        saved = list_checkpoints(disturbed / "checkpoints")
        # A run follows each damage, which would else befall one checkpoint until nothing of it is left.
        may_damage = len(saved) > 1 and not is_damaged
        fault = random.choice(ENDING + DAMAGING if may_damage else ENDING)
        is_damaged = fault in DAMAGING
        if is_damaged:
            damage(fault, saved[-1], random)
        else:
            disturb(fault, disturbed, corpus, worlds[number % len(worlds)], random)
        done[fault] += 1
    finish(disturbed, corpus, worlds[-1])
    return {
        "command": f"python -m tests.fuzz.soak --faults {faults} --worlds {' '.join(map(str, worlds))} --seed {seed}",
        "faults": dict(done),
        "injected": sum(done.values()),
        "updates": UPDATES,
        "processes": list(worlds),
        **compare(straight, disturbed, alone=set(worlds) == {1}),
        "seconds": round(time.monotonic() - started),
        "hardware": hardware(torch.device("cpu")),
        "versions": versions(),
    }


def compare(straight: Path, disturbed: Path, *, alone: bool) -> dict[str, Any]:
    """Whether both runs ended in the same way: bit for bit in one process, up to 1e-6 of the losses otherwise."""
    one, two = summary(straight), summary(disturbed)
    differences = [abs(a["loss"] - b["loss"]) for a, b in zip(one["curve"], two["curve"], strict=True)]
    relative = [difference / line["loss"] for difference, line in zip(differences, one["curve"], strict=True)]
    steps = [[(line["step"], line["split"]) for line in found["curve"]] for found in (one, two)]
    is_same = one == two if alone else steps[0] == steps[1] and max(relative) < 1e-6
    return {"largest difference of a loss": max(differences), "bit for bit": one == two, "same": is_same}


def damage(fault: str, checkpoint: Path, random: Random) -> None:
    """Tears, flips or removes a file of a checkpoint."""
    file = random.choice(sorted(path for path in checkpoint.rglob("*") if path.is_file()))
    content = bytearray(file.read_bytes())
    place = random.randrange(len(content))
    if fault == "lost":
        file.unlink()
    elif fault == "torn":
        file.write_bytes(content[:place])
    else:
        content[place] ^= 1 << random.randrange(8)
        file.write_bytes(content)


def disturb(fault: str, output: Path, corpus: Path, processes: int, random: Random) -> None:
    """Runs until the fault strikes one process, which is killed, or by itself tells of it in one line.

    Raises:
        AssertionError: a process by itself ends with a traceback.
    """
    disturbed, size = random.randrange(processes), 1 << random.randrange(10, 18)
    event = random.randrange(1, EVENTS_OF_OTHERS if disturbed else EVENTS)
    for ended in run_in(processes, output, corpus, partial(strike, fault, event, output, size), disturbed):
        if ended is not None and ended.exception is not None and processes == 1:
            raise AssertionError(f"{fault} at event {event}: {ended.exception}")


def finish(output: Path, corpus: Path, processes: int) -> None:
    """Lets a run come to its end, if it has not; only the first process tells why it refuses to."""
    ended, *_ = run_in(processes, output, corpus, lambda: None, 0)
    assert ended is not None, output
    assert ended.status == 0 or "already holds a finished model" in ended.errors, ended


def run_in(
    processes: int, output: Path, corpus: Path, prepare: Callable[[], None], disturbed: int
) -> list[Ended | None]:
    """The command in as many processes, of which `disturbed` is prepared; None for one that was killed."""
    options = {**RUN, "output": str(output), "dataset": str(corpus), "batch_size": str(SEQUENCES // processes)}
    argv = ["pretrain", *as_options(options)]
    port = free_port()
    with ExitStack() as stack:
        children = []
        for rank in range(processes):
            act = prepare if rank == disturbed else lambda: None
            children.append(stack.enter_context(in_child(member(argv, rank, processes, port, act))))
        first = outcome(children.pop(disturbed), SECONDS)
        seconds = SECONDS if first is not None and first.status == 0 else GRACE
        return [first, *(outcome(child, seconds) for child in children)]


def member(
    argv: Sequence[str], rank: int, processes: int, port: int, prepare: Callable[[], None]
) -> Callable[[Callable[[Any], None]], None]:
    """What one of the processes does: it joins the others, if there are others, and runs the command."""

    def join() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        if processes > 1:
            os.environ.update(torchrun_environment(rank, processes, port))
        prepare()

    return lambda tell: tell(run_here(argv, join))


def outcome(child: Child, seconds: float) -> Ended | None:
    """How the command of a process ended; None if the process was killed, or does not end in time."""
    try:
        return child.hear(seconds)
    except (EOFError, TimeoutError):
        return None


if __name__ == "__main__":
    sys.exit(main())
