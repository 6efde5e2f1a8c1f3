"""Goes through all kinds of fuzzing in turns until the time is over.

    make fuzz FUZZ_SECONDS=1800 FUZZ_SEED=7
    python -m tests.fuzz.main --kinds composed-op relative-op --seconds 60
    python -m tests.fuzz.main --repeat composed-op '{"class": ...}'

Prints the number of cases of each class and every finding with the command that repeats it; exits with 1 if there was
a finding that `known.py` does not explain.
"""

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from transformers.utils.logging import disable_progress_bar

from .. import conftest  # noqa: F401  (one thread, no network, poisoned memory)
from .harness import Kind, Outcome, as_line, check_apart, check_here
from .kinds.every import KINDS
from .known import KNOWN

# Of findings that only differ in their numbers this many are shown, and the others counted.
SHOWN = 2


@dataclass
class Tally:
    """Cases by kind and class, and findings by what they say."""

    cases: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)
    known: Counter[str] = field(default_factory=Counter)

    def add(self, kind: Kind, outcome: Outcome) -> None:
        self.cases[f"{kind.name} / {outcome.case['class']}"] += 1
        if outcome.finding is None:
            return
        explanations = [known for known in KNOWN if known.explains(kind.name, outcome.case, outcome.finding)]
        if explanations:
            self.known[explanations[0].reason] += 1
            return
        alike = f"{kind.name}: {without_numbers(outcome.finding)}"
        self.findings[alike] += 1
        if self.findings[alike] <= SHOWN:
            print(f"FINDING {kind.name}: {outcome.finding}\n    {as_line(kind.name, outcome.case)}", flush=True)

    def report(self) -> str:
        lines = [f"{number:>8}  {name}" for name, number in sorted(self.cases.items())]
        lines += [f"{number:>8}  known: {reason}" for reason, number in sorted(self.known.items())]
        lines += [f"{number:>8}  FINDINGS {finding}" for finding, number in sorted(self.findings.items())]
        return "\n".join([*lines, f"{self.cases.total():>8}  cases, {self.findings.total()} findings"])


def main() -> int:
    """Returns the exit status."""
    disable_progress_bar()
    arguments = parse()
    if arguments.repeat:
        return repeat(*arguments.repeat)
    chosen = [KINDS[name] for name in arguments.kinds or KINDS]
    print(f"FUZZ_SEED={arguments.seed} FUZZ_SECONDS={arguments.seconds:g}", flush=True)
    tally = fuzz(chosen, arguments.seed, arguments.seconds)
    print(tally.report())
    return 1 if tally.findings else 0


def without_numbers(finding: str) -> str:
    """What findings of one cause have in common; behind a bar stand details of the case."""
    finding = re.sub(r"\S*dynattn-fuzz\S*", "PATH", finding.partition(" | ")[0])
    return re.sub(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", "N", finding)


def fuzz(kinds: list[Kind], seed: int, seconds: float) -> Tally:
    """Runs batches of all kinds in turns; every batch begins in time, and ends when it ends."""
    tally, end = Tally(), time.monotonic() + seconds
    for kind, seeds in batches(kinds, seed):
        for outcome in check_apart(kind, map(kind.case, seeds)):
            tally.add(kind, outcome)
        if time.monotonic() > end:
            return tally
    raise AssertionError("batches never end")


def batches(kinds: list[Kind], seed: int) -> Iterator[tuple[Kind, range]]:
    """Yields what to run, without end: a kind, and the seeds of its next cases."""
    for turn in count():
        for kind in kinds:
            first = seed * 10**9 + turn * kind.batch
            yield kind, range(first, first + kind.batch)


def repeat(name: str, text: str) -> int:
    """Runs one case in this process, where a debugger can see it."""
    KINDS[name].prepare()
    finding = check_here(KINDS[name], json.loads(text))
    print(finding or "passes")
    return 1 if finding else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.main", description="Hostile random cases.")
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), help="only these (all)")
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("FUZZ_SECONDS", "1800")))
    parser.add_argument("--seed", type=int, default=int(os.environ.get("FUZZ_SEED", time.time_ns() // 10**9 % 10**6)))
    parser.add_argument("--repeat", nargs=2, metavar=("KIND", "CASE"), help="one case, as a finding prints it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
