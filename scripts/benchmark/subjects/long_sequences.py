"""Long sequences: the attention op from 1,024 tokens to 65,536, with a window and without.

Candidates that hold maps of all pairs of tokens are left out where one of these maps is larger than LARGEST_MAP. The
gradient of the output is zero except for a few queries in the middle and at the end, so the reference is computed for
these queries alone, which fits in memory: their outputs, and the gradients of everything that they depend on.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..harness.accuracy import Results
from ..harness.inputs import COMPOSED, OpInputs, inputs_of, reference_results
from ..harness.interface import COMPILED, Candidate, Case, Subject
from ..harness.settings import BenchmarkSettings
from ..harness.shapes import Shape
from . import attention
from .attention import OpProblem

LONGEST_BACKWARD = 16384
WINDOW = 256
# The number of queries compared with the reference before the middle, and again before the end.
CHECKED = 16
QUADRATIC = ("eager", "matmul", "x-transformers")
# Candidates that keep the maps of all their chunks for the backward pass.
QUADRATIC_BACKWARD = tuple(f"{name}{end}" for name in ("chunks", "talking-heads", "official") for end in ("", COMPILED))
LARGEST_MAP = 1 << 30  # bytes


@dataclass(frozen=True)
class LongProblem:
    """The op's problem, and the positions of the queries whose outputs are compared."""

    op: OpProblem
    checked: Tensor  # [2 * CHECKED]


def candidates(device: torch.device) -> list[Candidate]:
    """The candidates of the subject `attention`."""
    return [replace(one, prepare=partial(prepare, candidate=one)) for one in attention.candidates(device)]


def prepare(problem: LongProblem, *, candidate: Candidate) -> Callable[[], Results]:
    """The candidate's own call, reduced to the outputs of the checked queries.

    Raises:
        ValueError: the candidate would hold a value for every pair of tokens, and these would be too many.
    """
    keeps_maps = candidate.name in QUADRATIC or (problem.op.backward and candidate.name in QUADRATIC_BACKWARD)
    inputs = problem.op.inputs[candidate.function]
    batch, heads, queries, _ = inputs.query.shape
    size = batch * heads * queries * inputs.key.shape[2] * inputs.query.itemsize  # bytes of a map `[B, H, T, S]`
    if keeps_maps and size > LARGEST_MAP:
        raise ValueError(f"it keeps maps of all pairs of tokens, {size / 2**30:.3g} GiB each")
    if inputs.window is not None and candidate.name.startswith("sdpa"):
        raise ValueError("it needs a mask of all pairs of tokens for a window")
    call = candidate.prepare(problem.op)

    def checked() -> Results:
        results = call()
        return {**results, "output": results["output"][:, problem.checked]}

    return checked


def cases(shape: Shape, settings: BenchmarkSettings) -> Iterator[Case]:
    """With the window asked for, else with one of 256 and without any; forward, then forward with backward."""
    for window in (WINDOW, None) if settings.window is None else (settings.window,):
        inputs = inputs_of(shape, settings, window=window)
        for backward in (False, True) if shape.length <= LONGEST_BACKWARD else (False,):
            yield make_case(inputs, shape, replace(settings, window=window), backward=backward)


def make_case(made: dict[str, OpInputs], shape: Shape, settings: BenchmarkSettings, *, backward: bool) -> Case:
    """A case of the subject `attention` that is compared with the reference for a few queries."""
    middle, end = shape.length // 2, shape.length
    chunks = [slice(max(0, middle - CHECKED), middle), slice(max(middle, end - CHECKED), end)]
    checked = torch.cat([torch.arange(one.start, one.stop, device=settings.device) for one in chunks])
    inputs = {name: with_cotangent_at(one, checked) for name, one in made.items()}
    case = attention.make_case(inputs, shape, settings, backward=backward, is_causal=True)
    return replace(
        case,
        problem=LongProblem(case.problem, checked),
        reference=lambda function, dtype: reference_results(inputs[function], dtype, backward=backward, chunks=chunks),
    )


def with_cotangent_at(inputs: OpInputs, queries: Tensor) -> OpInputs:
    """The same inputs with a cotangent `[B, T, H, D]` that is zero except at the positions `queries` `[N]`."""
    cotangent = torch.zeros_like(inputs.cotangent)
    return replace(inputs, cotangent=cotangent.index_copy_(1, queries, inputs.cotangent[:, queries]))


LONG = Subject(
    name="long",
    function=COMPOSED,
    shapes=tuple(f"8x64@{1024 << doubling}" for doubling in range(7)),
    quick_shapes=("4x32@1024", "4x32@2048"),
    candidates=candidates,
    cases=cases,
)
