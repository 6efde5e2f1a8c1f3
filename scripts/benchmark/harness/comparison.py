"""Runs one case: checks every candidate, measures its memory, and times all of them in interleaved rounds."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import cache, partial
from typing import Any

import torch

from ...common.errors import first_line
from ...common.measuring import calls_of_a_sample, interleave, peak_memory, sample, summarize
from .accuracy import Results, Verdict, judge
from .interface import Candidate, Case
from .settings import BenchmarkSettings

# The failure of a candidate that was left out for its slowness starts with this.
OVER_BUDGET = "over the budget"
Row = dict[str, Any]
Call = Callable[[], Results]
# Reference results of a function in float64 and in the dtype that is measured.
References = Callable[[str], tuple[Results, Results]]


class OverBudgetError(Exception):
    """A candidate is too slow for the time that it was given."""


def run_case(
    case: Case, candidates: Sequence[Candidate], settings: BenchmarkSettings, too_slow: Collection[str] = ()
) -> list[Row]:
    """Checks, measures and times every candidate except those `too_slow`; returns one row of the record for each.

    A candidate is checked before the first round and again after the last. A wrong candidate gets no ratio.
    """
    references = cache(lambda name: (case.reference(name, torch.float64), case.reference(name, settings.dtype)))
    rows: list[Row] = [{"name": one.name, "role": one.role, "function": one.function} for one in candidates]
    calls: dict[str, Call] = {}
    with fresh_compilation():
        for candidate, row in zip(candidates, rows, strict=True):
            if candidate.name in too_slow:
                row["failure"] = f"{OVER_BUDGET} with fewer tokens already"
                continue
            try:
                calls[candidate.name] = qualify(candidate.prepare(case.problem), row, references, settings)
            except OverBudgetError as error:
                row["failure"] = f"{OVER_BUDGET}: {error}"
            except Exception as error:  # compilers and kernels raise exceptions of any type
                row["failure"] = f"{type(error).__name__}: {first_line(error)}"
        time_rounds(calls, rows, settings)
        for row in rows:
            if row["name"] in calls:
                verdict = judge(calls[row["name"]](), *references(row["function"]))
                finish_row(row, verdict, case, settings)
    add_ratios(rows)
    return rows


def qualify(call: Call, row: Row, references: References, settings: BenchmarkSettings) -> Call:
    """Makes the first call (which compiles), measures peak memory and checks the results; returns the warm `call`.

    Raises:
        OverBudgetError: the first call took longer than the settings allow.
    """
    row["first_seconds"] = sample(call, 1, settings.device)
    if settings.budget is not None and row["first_seconds"] > settings.budget:
        raise OverBudgetError(f"its first call took {row['first_seconds']:.3g} s, more than {settings.budget:g} s")
    results: list[Results] = []
    row["peak_bytes"] = peak_memory(lambda: results.append(call()), settings.device)
    row["verdict"] = judge(results.pop(), *references(row["function"]))
    return call


def time_rounds(calls: dict[str, Call], rows: list[Row], settings: BenchmarkSettings) -> None:
    """Times the candidates in interleaved rounds and adds `samples` and `timing` to their rows."""
    device = settings.device
    repeats = {name: calls_of_a_sample(call, device, settings.sample_seconds) for name, call in calls.items()}
    samplers = {name: partial(sample, call, repeats[name], device) for name, call in calls.items()}
    samples = interleave(samplers, settings.rounds, settings.budget)
    for row in rows:
        if row["name"] in samples:
            row["samples"] = samples[row["name"]]
            row["timing"] = asdict(summarize(row["samples"], repeats[row["name"]]))


def finish_row(row: Row, last_verdict: Verdict, case: Case, settings: BenchmarkSettings) -> None:
    """Keeps the worse of the two verdicts, and adds rates if the results are right."""
    verdict = max(row["verdict"], last_verdict, key=lambda one: one.excess)
    row["verdict"] = {**asdict(verdict), "correct": verdict.correct}
    row["flops"] = case.flops(row["function"])
    row["traffic_bytes"] = case.traffic(row["function"]) if case.traffic else None
    if verdict.correct:
        row["flops_per_second"] = row["flops"] / row["timing"]["median"]
        row["tokens_per_second"] = case.tokens / row["timing"]["median"] if case.tokens else None


def add_ratios(rows: list[Row]) -> None:
    """Divides medians by that of the fastest correct plain attention; wrong candidates get no ratio."""
    correct = [row for row in rows if "verdict" in row and row["verdict"]["correct"]]
    plain = [row for row in correct if row["role"] == "plain"]
    if not plain:
        return
    best = min(plain, key=lambda row: row["timing"]["median"])
    for row in correct:
        row["ratio"] = row["timing"]["median"] / best["timing"]["median"]
        row["is_baseline"] = row is best


def fresh_compilation() -> AbstractContextManager[None]:
    """Forgets what earlier cases compiled, and makes `torch.compile` fail where it would silently fall back."""
    torch.compiler.reset()
    return torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True)
