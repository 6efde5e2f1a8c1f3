"""Runs one case: checks every candidate, measures its memory, and times all of them in interleaved rounds."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import cache, partial
from typing import Any

import torch

from ...common.errors import first_line
from ...common.measuring import calls_of_a_sample, interleave, peak_memory, sample, summarize
from .accuracy import Results, Verdict, judge
from .interface import Candidate, Case
from .interruptions import check_device
from .settings import BenchmarkSettings

# How the failure of a candidate begins if it was left out as too slow, and if there is no reference to compare it with.
OVER_BUDGET, NO_REFERENCE = "over the budget", "the reference fails"
Row = dict[str, Any]
Call = Callable[[], Results]
# Reference results of a function in float64 and in the dtype that is measured.
References = Callable[[str], tuple[Results, Results]]


class OverBudgetError(Exception):
    """A candidate is too slow for the time that it was given."""


class CandidateError(Exception):
    """A candidate that passed its checks fails later; the arguments are its name and the failure."""


def run_case(
    case: Case,
    candidates: Sequence[Candidate],
    settings: BenchmarkSettings,
    left_out: Mapping[str, str],
    begin: Callable[[str | None], None],
) -> list[Row]:
    """Checks, measures and times every candidate; returns one row of the record for each.

    A candidate is checked before the first round and again after the last. A wrong candidate gets no ratio.

    Args:
        left_out: the candidates that are not run, and the failures that their rows have.
        begin: is told which candidate is run next, None for all of them by turns.

    Raises:
        DeviceLostError: a candidate fails, and after it the device fails every call.
    """
    references = cache(lambda name: (case.reference(name, torch.float64), case.reference(name, settings.dtype)))
    rows: dict[str, Row] = {
        one.name: {"name": one.name, "role": one.role, "function": one.function} for one in candidates
    }
    calls: dict[str, Call] = {}

    @cache
    def fault_of_reference(function: str) -> str | None:
        """Why a function has no references, if so. The time that they take, and their failure, are no candidate's."""
        begin(None)
        try:
            references(function)
        except Exception as error:  # memory may not suffice for them
            failure = f"{NO_REFERENCE}: {describe(error)}"
            check_device(settings.device, failure)
            return failure
        return None

    with fresh_compilation():
        for candidate in candidates:
            row = rows[candidate.name]
            if candidate.name in left_out:
                row["failure"] = left_out[candidate.name]
                continue
            if failure := fault_of_reference(candidate.function):
                row["failure"] = failure
                continue
            try:
                begin(candidate.name)
                calls[candidate.name] = qualify(candidate.prepare(case.problem), row, references, settings)
            except OverBudgetError as error:
                row["failure"] = f"{OVER_BUDGET}: {error}"
            except Exception as error:  # compilers and kernels raise exceptions of any type
                row["failure"] = describe(error)
                check_device(settings.device, row["failure"])
        time_who_remains(calls, rows, references, case, settings, begin)
    finished = list(rows.values())
    add_ratios(finished)
    return finished


def describe(error: Exception) -> str:
    """The failure of a row."""
    return f"{type(error).__name__}: {first_line(error)}"


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


def time_who_remains(
    calls: dict[str, Call],
    rows: Mapping[str, Row],
    references: References,
    case: Case,
    settings: BenchmarkSettings,
    begin: Callable[[str | None], None],
) -> None:
    """Times all candidates, and after a failure of one of them all others again; the arguments are those of `run_case`.

    Raises:
        DeviceLostError: a candidate fails, and after it the device fails every call.
    """
    while calls:
        begin(None)
        try:
            time_rounds(calls, rows, references, case, settings)
            break
        except CandidateError as error:
            name, failure = error.args
            rows[name]["failure"] = failure
            del calls[name], rows[name]["verdict"]
            begin(name)
            check_device(settings.device, failure)


def time_rounds(
    calls: dict[str, Call], rows: Mapping[str, Row], references: References, case: Case, settings: BenchmarkSettings
) -> None:
    """Times the candidates in interleaved rounds, checks them again, and finishes their rows.

    Raises:
        CandidateError: one of them fails; the rows of all others can be finished without it.
    """
    device = settings.device
    repeats = {
        name: _blaming(name, partial(calls_of_a_sample, call, device, settings.sample_seconds))
        for name, call in calls.items()
    }
    samplers = {
        name: partial(_blaming, name, partial(sample, call, repeats[name], device)) for name, call in calls.items()
    }
    samples = interleave(samplers, settings.rounds, settings.budget)
    verdicts = {
        name: _blaming(name, partial(_judge_again, call, references(rows[name]["function"])))
        for name, call in calls.items()
    }
    for name, verdict in verdicts.items():
        row = rows[name]
        row["samples"] = samples[name]
        row["timing"] = asdict(summarize(samples[name], repeats[name]))
        finish_row(row, verdict, case)


def _judge_again(call: Call, references: tuple[Results, Results]) -> Verdict:
    """The verdict on one more call."""
    return judge(call(), *references)


def _blaming(name: str, call: Callable[[], Any]) -> Any:
    """Calls, and raises CandidateError with the candidate's name for whatever is raised."""
    try:
        return call()
    except Exception as error:  # kernels raise exceptions of any type
        raise CandidateError(name, describe(error)) from error


def finish_row(row: Row, last_verdict: Verdict, case: Case) -> None:
    """Keeps the worse of the two verdicts, and adds rates if the results are right."""
    verdict = max(row["verdict"], last_verdict, key=lambda one: one.excess)
    row["verdict"] = {**verdict.as_record(), "correct": verdict.correct}
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
