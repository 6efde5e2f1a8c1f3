"""Profile of an attention call without C code: the time of each part, beside the least that it could take here.

The op's functions are temporarily replaced by the same functions under a clock. What a call does outside of them is
`rest`: packing of factors, copies, buffers, autograd and the loop in Python.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynattn.modeling.ops.dcmha.chunked import chunk, tiling
from dynattn.modeling.ops.dcmha.chunked.composers.interface import ChunkComposer

from ...common.errors import UserError
from ...common.measuring import interleave, sample, summarize
from ..harness.inputs import COMPOSED, OpInputs, evaluate
from ..harness.interface import Candidate, Case, Subject
from ..harness.overrides import override_attributes
from ..harness.settings import BenchmarkSettings
from ..harness.shapes import visible_pairs
from . import attention
from .attention import ATTENTION, COMPILE_MODES, OpProblem, call_op, compiling_as
from .op_flops import composition_flops
from .parts import (
    BACKWARD_PARTS,
    CHUNK_FUNCTIONS,
    COMPOSER_FUNCTIONS,
    FORWARD_PARTS,
    LAST_PARTS,
    MATMULS,
    PART_FUNCTIONS,
    REST,
    UNCLOCKED,
    WHOLE,
)

# The candidate that is profiled, and the one to which ratios refer, as in the other subjects.
PROFILED, BASELINE = "chunked-stepwise", "sdpa"

# Elements of an attention map that fits in the processor's cache, and how many passes over it make a sample.
PASS_ELEMENTS, PASSES, PASS_SAMPLES = 1 << 17, 100, 5


# The op that is profiled.
attend_chunked = partial(call_op, implementation="chunked")


class PartClock:
    """Seconds and calls of each part of the op, while it is installed."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.parts = FORWARD_PARTS
        self.softmaxes = 0

    def in_phases(self, attend: Callable[[OpInputs], Tensor]) -> Callable[[OpInputs], Tensor]:
        """The same function, which returns `[B, T, H, D]` and marks where the backward pass begins."""

        def attend_forward(inputs: OpInputs) -> Tensor:
            """Returns `[B, T, H, D]`."""
            self.parts = FORWARD_PARTS
            output = attend(inputs)
            self.parts = BACKWARD_PARTS
            return output

        return attend_forward

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replaces the op's functions by the same functions under the clock, and C code by these functions."""
        functions = {name: self.timed(name, getattr(chunk, name)) for name in CHUNK_FUNCTIONS}
        choose = tiling.choose_composer
        composers = {
            "choose_composer": lambda *arguments: self.timed_composer(choose(*arguments)),
            "STEPWISE": self.timed_composer(tiling.STEPWISE),
        }
        with (
            compiling_as(COMPILE_MODES[PROFILED]),
            override_attributes(chunk, functions),
            override_attributes(tiling, composers),
        ):
            yield

    def timed_composer(self, composer: ChunkComposer) -> ChunkComposer:
        """The same composer, under the clock."""
        functions: dict[str, Any] = {name: self.timed(name, getattr(composer, name)) for name in COMPOSER_FUNCTIONS}
        return composer._replace(**functions)

    def timed(self, name: str, function: Callable[..., None]) -> Callable[..., None]:
        """The same function, under the clock."""

        def run(*arguments: Any, **options: Any) -> None:
            start = time.perf_counter_ns()
            function(*arguments, **options)
            self.add(name, time.perf_counter_ns() - start)

        return run

    def add(self, name: str, nanoseconds: int) -> None:
        """Adds a call of the function `name` to the part that it computes at this point of a chunk.

        Raises:
            RuntimeError: there is no such part; the op works in another order than `parts.py` says.
        """
        part = self.parts.get((name, self.softmaxes))
        if part is None:
            raise RuntimeError(f"a chunk has no part for {name} after {self.softmaxes} softmax steps; update parts.py")
        self.seconds[part] += nanoseconds / 1e9
        self.calls[part] += 1
        self.softmaxes += name.startswith("softmax")
        if part in LAST_PARTS:
            self.softmaxes = 0


class Floors(NamedTuple):
    """Lower bounds of the time of a call and its parts.

    Attributes:
        pairs: visible (query, key) pairs of all heads.
        width: head width.
        composition: FLOPs of one composition stage for one pair.
        call: FLOPs of the whole call.
        matmul_rate: FLOP/s of a large matrix product.
        pass_rate: elements/s of a pass over an attention map in the processor's cache.
    """

    pairs: int
    width: int
    composition: int
    call: float
    matmul_rate: float
    pass_rate: float

    def seconds(self, part: str) -> float | None:
        """The floor of a part; None for the rest of a call, which has none.

        A matrix product is bounded by its FLOPs at the rate of a large one, any other part by its FLOPs and by one pass
        over the map, and the whole call by its FLOPs.
        """
        if part in (REST, UNCLOCKED):
            return None
        if part == WHOLE:
            return self.call / self.matmul_rate
        function = PART_FUNCTIONS[part]
        flops = {"compose": self.composition, "compose_backward": 2 * self.composition}
        flops |= dict.fromkeys(MATMULS, 2 * self.width)
        passes = 0 if function in MATMULS else 1
        return self.pairs * max(flops.get(function, 0) / self.matmul_rate, passes / self.pass_rate)


class Profile:
    """Samples of the parts of a call."""

    def __init__(self, problem: OpProblem, repeats: int) -> None:
        self.inputs, self.backward = problem.inputs[COMPOSED], problem.backward
        self.samples: list[dict[str, float]] = []
        self.calls: dict[str, float] = {}
        self.repeats = repeats

    def take(self) -> float:
        """Seconds of one of `repeats` calls in a row; keeps those of its parts, and of a call without the clock."""
        clock = PartClock()
        call = partial(evaluate, clock.in_phases(attend_chunked), self.inputs, backward=self.backward)
        device = self.inputs.query.device
        with clock.installed():
            whole = sample(call, self.repeats, device)
        with compiling_as(COMPILE_MODES[PROFILED]):
            unclocked = sample(call, self.repeats, device)
        parts = {name: clock.seconds[name] / self.repeats for name in PART_FUNCTIONS if name in clock.seconds}
        rest = {REST: whole - sum(parts.values()), WHOLE: whole, UNCLOCKED: unclocked}
        self.samples.append(parts | rest)
        self.calls = {name: clock.calls[name] / self.repeats for name in parts}
        return whole

    def record(self, floors: Floors) -> list[dict[str, Any]]:
        """All parts in JSON types; `calls` counts the calls of a part's function in one call of the op."""
        return [
            {
                "name": part,
                "function": PART_FUNCTIONS.get(part),
                "calls": self.calls.get(part),
                "samples": [one[part] for one in self.samples],
                "timing": asdict(summarize([one[part] for one in self.samples], self.repeats)),
                "floor_seconds": floors.seconds(part),
            }
            for part in self.samples[0]
        ]


def candidates(device: torch.device) -> list[Candidate]:
    """`chunked` without C code, and the plain attention that ratios refer to.

    Raises:
        UserError: the device works asynchronously, so that the processor's clock does not measure it.
    """
    if device.type != "cpu":
        raise UserError(f"the subject profile reads the processor's clock, not that of {device}; use --device cpu")
    return [one for one in attention.candidates(device) if one.name in (PROFILED, BASELINE)]


def add_profile(
    rows: list[dict[str, Any]], case: Case, settings: BenchmarkSettings, machine: Mapping[str, float]
) -> None:
    """Adds a `profile` to the row of the candidate `PROFILED`, if it was timed."""
    batch, heads, length, width = case.problem.inputs[COMPOSED].query.shape
    pairs = heads * batch * visible_pairs(length, case.window)
    composition = composition_flops(COMPOSED, heads)
    rates = machine["gemm_flops_per_second"], machine["pass_elements_per_second"]
    for row in rows:
        if row["name"] == PROFILED and "timing" in row:
            profile = Profile(case.problem, row["timing"]["calls"])
            interleave({PROFILED: profile.take}, settings.rounds, settings.budget)
            row["profile"] = profile.record(Floors(pairs, width, composition, row["flops"], *rates))


def pass_rate(device: torch.device) -> float:
    """Elements/s of the cheapest pass over a float32 map in the processor's cache, an in-place multiplication."""
    maps = torch.ones(PASS_ELEMENTS, device=device)
    return PASS_ELEMENTS / min(sample(lambda: maps.mul_(1.0), PASSES, device) for _ in range(PASS_SAMPLES))


PROFILE = Subject("profile", COMPOSED, ATTENTION.shapes, ("4x32@256",), candidates, attention.cases)
