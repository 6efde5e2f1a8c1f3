"""Where the time of an attention call goes: part by part, each next to the least that it could take on this machine.

For a while the op's functions are replaced by the same ones under a clock. What a call does outside of them is `rest`:
packing of factors, copies, buffers, autograd and the loop in Python.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynattn.modeling.ops.dcmha.chunked import chunk, tiling
from dynattn.modeling.ops.dcmha.chunked.composers.interface import Composer

from ...common.errors import UserError
from ...common.measuring import interleave, sample, summarize
from ..harness.contest import Case, Contestant, Subject
from ..harness.inputs import COMPOSED, PLAIN, Inputs, evaluate
from ..harness.settings import Settings
from ..harness.shapes import Shape, visible_pairs
from ..harness.tuning import Knob, using
from . import attention
from .attention import ATTENTION, OpProblem, attend_ours, attend_uncomposed
from .op_flops import composition_flops

PROFILED: dict[str, tuple[str, Callable[[Inputs], Tensor]]] = {
    "chunked": (COMPOSED, partial(attend_ours, implementation="chunked")),
    "chunked-plain": (PLAIN, partial(attend_uncomposed, implementation="chunked")),
}
# Takes part without parts, so that ratios refer to the attention that they refer to elsewhere.
BASELINE = "sdpa"

PRODUCTS = ("multiply_heads", "add_to_heads")
COMPOSERS = ("compose", "compose_backward", "softmax", "softmax_backward")
REST, WHOLE, UNCLOCKED = "rest", "whole call", "without the clock"
# What a function does to a chunk, by how many of its two softmax steps are done. The backward pass repeats the forward
# pass first.
FORWARD_PARTS = {
    ("multiply_heads", 0): "scores",
    ("compose", 0): "pre-composition",
    ("softmax", 0): "softmax",
    ("compose", 1): "post-composition",
    ("multiply_heads", 1): "output",
}
BACKWARD_PARTS = {
    ("multiply_heads", 0): "scores again",
    ("compose", 0): "pre-composition again",
    ("softmax", 0): "softmax again",
    ("compose", 1): "post-composition again",
    ("add_to_heads", 1): "value gradient",
    ("multiply_heads", 1): "probability gradient",
    ("compose_backward", 1): "post-composition backward",
    ("softmax_backward", 1): "softmax backward",
    ("compose_backward", 2): "pre-composition backward",
    ("multiply_heads", 2): "query gradient",
    ("add_to_heads", 2): "key gradient",
}
FUNCTIONS = {part: function for parts in (FORWARD_PARTS, BACKWARD_PARTS) for (function, _), part in parts.items()}
LAST_PARTS = ("output", "key gradient")
# A map that stays in the processor's cache, and how many passes over it make a sample.
PASS_ELEMENTS, PASSES, PASS_SAMPLES = 1 << 17, 100, 5


class Clock:
    """Seconds and calls of each part, while it watches the op."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.parts = FORWARD_PARTS
        self.softmaxes = 0

    def in_phases(self, attend: Callable[[Inputs], Tensor]) -> Callable[[Inputs], Tensor]:
        """The same function; until it returns the pass is the forward one, and then the backward one."""

        def attend_forward(inputs: Inputs) -> Tensor:
            self.parts = FORWARD_PARTS
            output = attend(inputs)
            self.parts = BACKWARD_PARTS
            return output

        return attend_forward

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Puts the op's functions under the clock."""
        products = {name: self.timed(name, getattr(chunk, name)) for name in PRODUCTS}
        choose = tiling.choose_composer
        composers = {
            "choose_composer": lambda *arguments: self.timed_composer(choose(*arguments)),
            "STEPWISE": self.timed_composer(tiling.STEPWISE),
        }
        with replacing(chunk, products), replacing(tiling, composers):
            yield

    def timed_composer(self, composer: Composer) -> Composer:
        """The same composer, under the clock."""
        functions: dict[str, Any] = {name: self.timed(name, getattr(composer, name)) for name in COMPOSERS}
        return composer._replace(**functions)

    def timed(self, name: str, function: Callable[..., None]) -> Callable[..., None]:
        """The same function, under the clock."""

        def run(*arguments: Any, **options: Any) -> None:
            start = time.perf_counter_ns()
            function(*arguments, **options)
            self.add(name, time.perf_counter_ns() - start)

        return run

    def add(self, name: str, nanoseconds: int) -> None:
        """Counts a call to the part that it is by its place in the work on a chunk.

        Raises:
            RuntimeError: it has no place there; the op works in another order than this module was written for.
        """
        part = self.parts.get((name, self.softmaxes))
        if part is None:
            raise RuntimeError(f"a chunk has no part for {name} after {self.softmaxes} softmax steps; profile.py lags")
        self.seconds[part] += nanoseconds / 1e9
        self.calls[part] += 1
        self.softmaxes += name.startswith("softmax")
        if part in LAST_PARTS:
            self.softmaxes = 0


class Floors(NamedTuple):
    """What bounds a call and its parts from below, for `pairs` visible (query, key) pairs of all heads."""

    pairs: int
    width: int
    composition: int  # FLOPs of a stage for a pair
    call: float  # FLOPs
    product_rate: float  # FLOP/s
    pass_rate: float  # elements/s

    def seconds(self, part: str) -> float | None:
        """Of a matrix product its FLOPs at the rate of a large one, of other parts no less than a pass over the map.

        The whole call has the floor of its FLOPs, the rest of it has none.
        """
        if part in (REST, UNCLOCKED):
            return None
        if part == WHOLE:
            return self.call / self.product_rate
        function = FUNCTIONS[part]
        flops = {"compose": self.composition, "compose_backward": 2 * self.composition}
        flops |= dict.fromkeys(PRODUCTS, 2 * self.width)
        passes = 0 if function in PRODUCTS else 1
        return self.pairs * max(flops.get(function, 0) / self.product_rate, passes / self.pass_rate)


class Profile:
    """Samples of one contestant's parts."""

    def __init__(self, name: str, problem: OpProblem, repeats: int) -> None:
        function, self.attend = PROFILED[name]
        self.inputs, self.backward = problem.inputs[function], problem.backward
        self.samples: list[dict[str, float]] = []
        self.calls: dict[str, float] = {}
        self.repeats = repeats

    def take(self) -> float:
        """Seconds of one of `repeats` calls in a row; keeps those of its parts, and of a call without the clock."""
        clock = Clock()
        call = partial(evaluate, clock.in_phases(self.attend), self.inputs, backward=self.backward)
        device = self.inputs.query.device
        with clock.watching():
            whole = sample(call, self.repeats, device)
        parts = {name: clock.seconds[name] / self.repeats for name in FUNCTIONS if name in clock.seconds}
        rest = {REST: whole - sum(parts.values()), WHOLE: whole, UNCLOCKED: sample(call, self.repeats, device)}
        self.samples.append(parts | rest)
        self.calls = {name: clock.calls[name] / self.repeats for name in parts}
        return whole

    def record(self, floors: Floors) -> list[dict[str, Any]]:
        """Every part in the record; `calls` are those of its function in a call of the op."""
        return [
            {
                "name": part,
                "function": FUNCTIONS.get(part),
                "calls": self.calls.get(part),
                "samples": [one[part] for one in self.samples],
                "timing": asdict(summarize([one[part] for one in self.samples], self.repeats)),
                "floor_seconds": floors.seconds(part),
            }
            for part in self.samples[0]
        ]


def contestants(device: torch.device) -> list[Contestant]:
    """`chunked`, its control without composition, and the plain attention that ratios refer to.

    Raises:
        UserError: the device runs on while the processor's clock is read.
    """
    if device.type != "cpu":
        raise UserError(f"the subject profile reads the processor's clock, not that of {device}; use --device cpu")
    return [one for one in attention.contestants(device) if one.name in (*PROFILED, BASELINE)]


def add_profiles(
    rows: list[dict[str, Any]], case: Case, shape: Shape, settings: Settings, machine: Mapping[str, float]
) -> None:
    """Adds a `profile` to the row of each contestant that can be looked into; they take turns, as in other subjects."""
    problem: OpProblem = case.problem
    profiles = {
        row["name"]: Profile(row["name"], problem, row["timing"]["calls"])
        for row in rows
        if row["name"] in PROFILED and "timing" in row
    }
    interleave({name: one.take for name, one in profiles.items()}, settings.rounds, settings.budget)
    pairs = shape.heads * settings.batch_size * visible_pairs(shape.length, case.window)
    rates = machine["gemm_flops_per_second"], machine["pass_elements_per_second"]
    for row in rows:
        if row["name"] in profiles:
            composition = composition_flops(row["function"], shape.heads)
            row["profile"] = profiles[row["name"]].record(Floors(pairs, shape.width, composition, row["flops"], *rates))


def pass_rate(device: torch.device) -> float:
    """Elements/s of multiplying a float32 map in the processor's cache in place: no pass over a map does less."""
    maps = torch.ones(PASS_ELEMENTS, device=device)
    return PASS_ELEMENTS / min(sample(lambda: maps.mul_(1.0), PASSES, device) for _ in range(PASS_SAMPLES))


def replacing(module: ModuleType, functions: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Gives functions of a module others in their place for a while."""
    return using(module, {Knob(name, ()): function for name, function in functions.items()})


PROFILE = Subject("profile", COMPOSED, ATTENTION.shapes, ("4x32@256",), contestants, attention.cases)
