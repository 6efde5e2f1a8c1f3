"""What all kinds of fuzzing share: cases, how a case runs without harming the others, and what counts as a finding.

A kind makes random cases and checks them. A case is a dictionary of JSON values, so that the line that reports a
finding is all that is needed to repeat it, whatever becomes of the generators.
"""

import json
import os
import pickle
import re
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from dynattn.modeling.ops import native_library

Case = dict[str, Any]  # JSON values; "class" says what is counted together


class FindingError(AssertionError):
    """The product did what it must not do. Every other exception of a check is a finding too."""


@dataclass(frozen=True)
class Kind:
    """One kind of hostile case.

    Attributes:
        generate: makes a case from a random number generator.
        check: raises where the product fails the case.
        fast: cases that the ordinary tests run.
        seconds: a case that takes longer hangs.
        prepare: makes what all cases read; called before the first.
        isolated: a case may crash or hang its process, or change it, so that the ordinary tests need a process for it.
        batch: cases that one process of the long run checks.
    """

    name: str
    generate: Callable[[Random], Case]
    check: Callable[[Case], None]
    prepare: Callable[[], object] = lambda: None
    fast: int = 20
    seconds: float = 120
    isolated: bool = True
    batch: int = 20

    def case(self, seed: int) -> Case:
        """Returns the case of a seed."""
        return self.generate(Random(f"{self.name} {seed}"))


@dataclass(frozen=True)
class Known:
    """A defect that is known and not mended yet.

    Attributes:
        kind: the name of the kind that finds it.
        says: a regular expression that its findings match, and no others.
        case: an example, which must fail.
        reason: what is wrong, and where.
        of: whether a case can come upon it.
    """

    kind: str
    says: str
    case: Case
    reason: str
    of: Callable[[Case], bool] = lambda case: True

    def explains(self, kind: str, case: Case, finding: str) -> bool:
        return kind == self.kind and self.of(case) and re.search(self.says, finding, re.DOTALL) is not None


@dataclass(frozen=True)
class Outcome:
    """What became of a case; without a finding all is well."""

    case: Case
    finding: str | None = None


def expect(condition: object, finding: str) -> None:
    if not condition:
        raise FindingError(finding)


def one_line(error: BaseException) -> str:
    """What an exception says, with the last place in the product that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "dynattn" in frame.filename and "fuzz" not in frame.filename]
    place = f" [{Path(ours[-1].filename).name}:{ours[-1].name}]" if ours else ""
    text = re.sub(r"(.)\1{30,}", r"\1...", " ".join(str(error).split()))[:400]
    return text if isinstance(error, FindingError) else f"{type(error).__name__}: {text}{place}"


def check_here(kind: Kind, case: Case) -> str | None:
    """Returns the finding of a case, or None."""
    try:
        kind.check(case)
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:  # whatever a hostile case raises is what fuzzing is for, SystemExit included
        return one_line(error)
    return None


def check_apart(kind: Kind, cases: Iterable[Case]) -> Iterator[Outcome]:
    """Checks cases in forked processes; a process that dies or hangs is the finding of the case that it was at."""
    waiting = list(cases)
    kind.prepare()
    while waiting:
        for outcome in _check_in_child(kind, tuple(waiting)):
            waiting.pop(0)
            yield outcome


def _check_in_child(kind: Kind, cases: tuple[Case, ...]) -> Iterator[Outcome]:
    """Yields outcomes up to the first that ended its process."""

    def work(tell: Callable[[Any], None]) -> None:
        # C code uses one thread in a forked process, which would wait for OpenMP's threads of its parent for ever. The
        # parent here has started none, so this process may have its own, as an ordinary one has.
        native_library._PROCESS = os.getpid()
        for case in cases:
            tell(check_here(kind, case))

    with in_child(work) as child:
        for case in cases:
            try:
                yield Outcome(case, child.hear(kind.seconds))
            except TimeoutError:
                yield Outcome(case, f"hangs: no end after {kind.seconds:g} seconds")
                return
            except EOFError:
                yield Outcome(case, f"the process ends: {child.wait()}")
                return


class Child:
    """A forked process that reports values."""

    def __init__(self, process: int, pipe: int) -> None:
        self.process, self.pipe = process, os.fdopen(pipe, "rb")
        self.status: int | None = None

    def hear(self, seconds: float) -> Any:
        """Returns the next value.

        Args:
            seconds: to wait on a machine that does nothing else; as many times longer as more wants to run than can.

        Raises:
            TimeoutError: the process does not report in time.
            EOFError: it has ended.
        """
        crowd = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        if not select.select([self.pipe], [], [], crowd * seconds)[0]:
            raise TimeoutError
        return pickle.load(self.pipe)

    def wait(self, seconds: float | None = None) -> str:
        """Waits for the end of the process and says how it ended: "killed by SIGSEGV", "status 0"."""
        end = None if seconds is None else time.monotonic() + seconds
        while self.status is None:
            done, status = os.waitpid(self.process, 0 if end is None else os.WNOHANG)
            if done:
                self.status = os.waitstatus_to_exitcode(status)
            elif end is not None and time.monotonic() > end:
                raise TimeoutError
            else:
                time.sleep(0.005)
        return f"status {self.status}" if self.status >= 0 else f"killed by {signal.Signals(-self.status).name}"

    def kill(self) -> None:
        if self.status is None:
            os.killpg(self.process, signal.SIGKILL)


@contextmanager
def in_child(work: Callable[[Callable[[Any], None]], object]) -> Iterator[Child]:
    """Runs `work` in a forked process, whose `tell` reports values; afterwards the process and its children are gone.

    A fork has everything imported already, which a fresh process would take seconds for.
    """
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        os.close(reading)
        _live(work, writing)
    os.close(writing)
    child = Child(process, reading)
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        child.pipe.close()


def _live(work: Callable[[Callable[[Any], None]], object], pipe: int) -> None:
    """A forked process: works, and ends without any of its parent's cleaning up."""
    status = 1
    try:
        os.setpgid(0, 0)
        with os.fdopen(pipe, "wb", buffering=0) as reports:
            work(lambda value: reports.write(pickle.dumps(value)) and None)
        status = 0
    except BaseException:  # a forked process must never return into its parent's code
        traceback.print_exc()
    finally:
        os._exit(status)


def as_line(kind: str, case: Case) -> str:
    """The command that repeats a case."""
    text = json.dumps(case).replace("'", "\\u0027")
    return f"python -m tests.fuzz.main --repeat {kind} '{text}'"
