"""Long sequences: the attention op from 1,024 tokens to 65,536, with a window and without.

Nobody takes part who holds a map over all pairs of tokens. The gradient of the output is zero but for a few queries in
the middle and at the end, so that the truth is that of these queries alone, which fits: their outputs, and the
gradients of all that they depend on.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..harness.accuracy import Results
from ..harness.contest import COMPILED, Case, Contestant, Subject
from ..harness.inputs import COMPOSED, Inputs, make_inputs, requiring_grad, truth_in
from ..harness.settings import Settings
from ..harness.shapes import Shape
from . import attention
from .attention import OpProblem, op_traffic
from .op_flops import attention_flops

LENGTHS, QUICK_LENGTHS = tuple(1024 << doubling for doubling in range(7)), (1024, 2048)
LONGEST_BACKWARD = 16384
WINDOW = 256
# Queries that are compared with the truth, at the middle and as many at the end.
CHECKED = 16
QUADRATIC = ("eager", "matmul")
# They keep the maps of all their chunks for a backward pass.
QUADRATIC_BACKWARD = tuple(f"{name}{end}" for name in ("chunks", "talking-heads", "official") for end in ("", COMPILED))


@dataclass(frozen=True)
class LongProblem:
    """The op's problem, and the queries whose outputs are compared."""

    op: OpProblem
    window: int | None
    checked: Tensor


def contestants(device: torch.device) -> list[Contestant]:
    """The op's own, without those that hold maps of all pairs even in a forward pass."""
    every = [one for one in attention.contestants(device) if one.name not in QUADRATIC]
    return [replace(one, prepare=partial(prepare, contestant=one)) for one in every]


def prepare(problem: LongProblem, *, contestant: Contestant) -> Callable[[], Results]:
    """What is timed gives the outputs of the checked queries.

    Raises:
        ValueError: the contestant would hold something for every pair of tokens.
    """
    if problem.op.backward and contestant.name in QUADRATIC_BACKWARD:
        raise ValueError("it keeps maps of all pairs of tokens for the backward pass")
    if problem.window is not None and contestant.name.startswith("sdpa"):
        raise ValueError("it needs a mask of all pairs of tokens for a window")
    call = contestant.prepare(problem.op)

    def checked() -> Results:
        results = call()
        return {**results, "output": results["output"][:, problem.checked]}

    return checked


def cases(shape: Shape, settings: Settings) -> Iterator[Case]:
    """With a window (256, or the one asked for) and, where none is asked for, without; forward, then with backward."""
    for window in (WINDOW, None) if settings.window is None else (settings.window,):
        inputs = make_inputs(
            shape.heads,
            shape.width,
            shape.length,
            shape.length,
            batch=settings.batch_size,
            dtype=settings.dtype,
            device=settings.device,
            seed=settings.seed,
            window=window,
        )
        for backward in (False, True) if shape.length <= LONGEST_BACKWARD else (False,):
            yield case(inputs, shape, window, settings, backward=backward)


def case(made: dict[str, Inputs], shape: Shape, window: int | None, settings: Settings, *, backward: bool) -> Case:
    """One case with the inputs of each function."""
    chunks = [slice(max(0, stop - CHECKED), stop) for stop in (shape.length // 2, shape.length)]
    checked = torch.cat([torch.arange(one.start, one.stop, device=settings.device) for one in chunks])
    inputs = {name: with_cotangent_at(one, checked) for name, one in made.items()}
    given = {name: requiring_grad(one) for name, one in inputs.items()} if backward else inputs
    passes = 3 if backward else 1
    return Case(
        passes="forward+backward" if backward else "forward",
        problem=LongProblem(OpProblem(given, backward), window, checked),
        truth=lambda function, dtype: truth_in(inputs[function], dtype, backward=backward, chunks=chunks),
        flops=lambda function: attention_flops(shape, window, function) * settings.batch_size * passes,
        traffic=lambda function: op_traffic(inputs[function]) * (2 if backward else 1),
        window=window,
    )


def with_cotangent_at(inputs: Inputs, queries: Tensor) -> Inputs:
    """The same inputs, with a gradient of the output that is zero but for some queries."""
    cotangent = torch.zeros_like(inputs.cotangent)
    return replace(inputs, cotangent=cotangent.index_copy_(1, queries, inputs.cotangent[:, queries]))


LONG = Subject(
    name="long",
    function=COMPOSED,
    shapes=tuple(f"8x64@{length}" for length in LENGTHS),
    quick_shapes=tuple(f"4x32@{length}" for length in QUICK_LENGTHS),
    contestants=contestants,
    cases=cases,
)
