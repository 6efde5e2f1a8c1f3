"""Contestants that compute the same thing, and how one case between them is run."""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, Literal

import torch

from ...common.errors import first_line
from ...common.measuring import calls_of_a_sample, interleave, peak_memory, sample, summarize
from .accuracy import Results, Verdict, judge
from .settings import Settings
from .shapes import Shape

# How the names of contestants end that go through `torch.compile`.
COMPILED = "-compiled"
# How the failure of a contestant starts that was left out for its slowness.
OVER_BUDGET = "over the budget"
Role = Literal["ours", "plain", "other"]
Pass = Literal["forward", "forward+backward"]


class OverBudgetError(Exception):
    """A contestant is too slow for the time that it was given."""


@dataclass(frozen=True)
class Contestant:
    """One way to compute something.

    Attributes:
        name: as in tables and in `--implementations`.
        role: `plain` ones compute multi-head attention as it always was; the fastest of them is what ratios refer to.
        function: what it computes; contestants of the same function must give the same results.
        prepare: takes a case's problem, does what may be done before the clock starts, and returns what is timed.
    """

    name: str
    role: Role
    function: str
    prepare: Callable[[Any], Callable[[], Results]]


@dataclass(frozen=True)
class Case:
    """One problem for all contestants of a subject.

    Attributes:
        truth: the reference op's results for a function, computed in a dtype from the problem's own numbers.
        flops: what a function needs, head composition included, recomputation and masked pairs not.
        traffic: bytes of all inputs and results of a function; None where they are not what limits it.
        tokens: what a call processes, where tokens per second mean something.
        window: keys that a query sees, itself included; None for all.
        note: what else tells this case from others of its subject.
    """

    passes: Pass
    problem: Any
    truth: Callable[[str, torch.dtype], Results]
    flops: Callable[[str], float]
    traffic: Callable[[str], float] | None = None
    tokens: int | None = None
    window: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Subject:
    """What is measured: its contestants, and its cases for a shape. `function` is the one that the subject is about."""

    name: str
    function: str
    shapes: Sequence[str]
    quick_shapes: Sequence[str]
    contestants: Callable[[torch.device], list[Contestant]]
    cases: Callable[[Shape, Settings], Iterable[Case]]


def run_case(
    case: Case, contestants: Sequence[Contestant], settings: Settings, too_slow: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Judges, weighs and times every contestant but those `too_slow`; returns one row of the record for each.

    A contestant is judged before the first round and again after the last. One that is wrong gets no ratio.
    """
    truth = cache(lambda function: (case.truth(function, torch.float64), case.truth(function, settings.dtype)))
    rows: list[dict[str, Any]] = []
    calls: dict[str, Callable[[], Results]] = {}
    with compiling_afresh():
        for contestant in contestants:
            rows.append({"name": contestant.name, "role": contestant.role, "function": contestant.function})
            if contestant.name in too_slow:
                rows[-1]["failure"] = f"{OVER_BUDGET} with fewer tokens already"
                continue
            try:
                calls[contestant.name] = qualify(contestant.prepare(case.problem), rows[-1], truth, settings)
            except OverBudgetError as error:
                rows[-1]["failure"] = f"{OVER_BUDGET}: {error}"
            except Exception as error:  # compilers and kernels raise what they like
                rows[-1]["failure"] = f"{type(error).__name__}: {first_line(error)}"
        time_rounds(calls, rows, settings)
        for row in rows:
            if row["name"] in calls:
                again = judge(calls[row["name"]](), *truth(row["function"]))
                finish_row(row, again, case, settings)
    add_ratios(rows)
    return rows


def qualify(
    call: Callable[[], Results],
    row: dict[str, Any],
    truth: Callable[[str], tuple[Results, Results]],
    settings: Settings,
) -> Callable[[], Results]:
    """Calls for the first time (which compiles), weighs and judges; returns `call`, which is warm then.

    Raises:
        OverBudgetError: the first call took longer than the settings allow.
    """
    row["first_seconds"] = sample(call, 1, settings.device)
    if settings.budget is not None and row["first_seconds"] > settings.budget:
        raise OverBudgetError(f"its first call took {row['first_seconds']:.3g} s, more than {settings.budget:g} s")
    results: list[Results] = []
    row["peak_bytes"] = peak_memory(lambda: results.append(call()), settings.device)
    row["verdict"] = judge(results.pop(), *truth(row["function"]))
    return call


def time_rounds(calls: dict[str, Callable[[], Results]], rows: list[dict[str, Any]], settings: Settings) -> None:
    """Interleaves the contestants and adds `timing` to their rows."""
    device = settings.device
    repeats = {name: calls_of_a_sample(call, device, settings.sample_seconds) for name, call in calls.items()}
    samplers = {name: partial(sample, call, repeats[name], device) for name, call in calls.items()}
    samples = interleave(samplers, settings.rounds, settings.budget)
    for row in rows:
        if row["name"] in samples:
            row["samples"] = samples[row["name"]]
            row["timing"] = asdict(summarize(row["samples"], repeats[row["name"]]))


def finish_row(row: dict[str, Any], again: Verdict, case: Case, settings: Settings) -> None:
    """Keeps the worse of both verdicts, and adds what follows from the median where the results are right."""
    verdict = max(row["verdict"], again, key=lambda one: one.excess)
    row["verdict"] = {**asdict(verdict), "correct": verdict.correct}
    row["flops"] = case.flops(row["function"])
    row["traffic_bytes"] = case.traffic(row["function"]) if case.traffic else None
    if verdict.correct:
        row["flops_per_second"] = row["flops"] / row["timing"]["median"]
        row["tokens_per_second"] = case.tokens / row["timing"]["median"] if case.tokens else None


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Divides medians by the fastest correct plain attention's; wrong contestants get no ratio and are no baseline."""
    correct = [row for row in rows if "verdict" in row and row["verdict"]["correct"]]
    plain = [row for row in correct if row["role"] == "plain"]
    if not plain:
        return
    best = min(plain, key=lambda row: row["timing"]["median"])
    for row in correct:
        row["ratio"] = row["timing"]["median"] / best["timing"]["median"]
        row["is_baseline"] = row is best


def compiling_afresh() -> AbstractContextManager[None]:
    """Forgets what earlier cases compiled, and makes `torch.compile` fail where it would fall back silently."""
    torch.compiler.reset()
    return torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` for lengths that vary."""
    return torch.compile(function, dynamic=True)
