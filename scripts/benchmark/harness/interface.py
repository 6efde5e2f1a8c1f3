"""The parts of a benchmark: subjects, the cases of a subject, and the candidates that are compared on each case."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .accuracy import Results
from .settings import BenchmarkSettings
from .shapes import Shape

# How the names of candidates end that go through `torch.compile`, that run in a CUDA graph, and of models without the
# window that the other candidates have.
COMPILED, GRAPH, GLOBAL = "-compiled", "-graph", "-global"
Role = Literal["ours", "plain", "other"]
Pass = Literal["forward", "forward+backward"]


def passes_of(backward: bool) -> Pass:
    """The passes of a case with or without a backward pass."""
    return "forward+backward" if backward else "forward"


@dataclass(frozen=True)
class Candidate:
    """One way to compute something.

    Attributes:
        name: as in tables and in `--implementations`.
        role: `plain` candidates compute ordinary multi-head attention; ratios refer to the fastest of them.
        function: what it computes; candidates of the same function must give the same results.
        prepare: takes a case's problem, does what may be done before the clock starts, and returns the call to time.
    """

    name: str
    role: Role
    function: str
    prepare: Callable[[Any], Callable[[], Results]]


@dataclass(frozen=True)
class Case:
    """One problem for all candidates of a subject.

    Attributes:
        problem: the inputs, in the form that the subject's candidates take.
        reference: results of the reference implementation of a function in a dtype, on the problem's own inputs.
        flops: FLOPs of a function, head composition included, recomputation and masked pairs not.
        traffic: bytes of all inputs and results of a function; None for a case that memory traffic does not bound.
        tokens: tokens that a call processes, if tokens per second are meaningful.
        window: keys that a query sees, itself included; None for all.
        note: what else distinguishes this case from others of its subject.
    """

    passes: Pass
    problem: Any
    reference: Callable[[str, torch.dtype], Results]
    flops: Callable[[str], float]
    traffic: Callable[[str], float] | None = None
    tokens: int | None = None
    window: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        function: the function that the subject is about, whose FLOPs are the floor in plots.
        shapes, quick_shapes: the default shapes, in full and in quick runs.
        candidates: the candidates on a device.
        cases: the cases of a shape.
    """

    name: str
    function: str
    shapes: Sequence[str]
    quick_shapes: Sequence[str]
    candidates: Callable[[torch.device], list[Candidate]]
    cases: Callable[[Shape, BenchmarkSettings], Iterable[Case]]
