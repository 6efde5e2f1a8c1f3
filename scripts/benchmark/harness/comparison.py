"""Runs one case: checks every candidate, measures its memory, and times all of them in interleaved rounds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import cache, partial
from typing import Any, NamedTuple

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
# Is told which candidate is run next, None for all of them by turns.
Begin = Callable[[str | None], None]


class QualifiedCandidate(NamedTuple):
    """A candidate that has passed its checks.

    Attributes:
        row: its row of the record, which its rounds finish.
        call: what is timed.
        references: results of the reference op in float64 and in the dtype that is measured.
    """

    row: Row
    call: Callable[[], Results]
    references: Sequence[Results]


class OverBudgetError(Exception):
    """A candidate is too slow for the time that it was given."""


class CandidateError(Exception):
    """A candidate that passed its checks fails later; the arguments are its name and the failure."""


def run_case(
    case: Case,
    candidates: Sequence[Candidate],
    settings: BenchmarkSettings,
    left_out: Mapping[str, str],
    begin: Begin,
) -> list[Row]:
    """Checks, measures and times every candidate; returns one row of the record for each.

    A candidate is checked before the first round and again after the last. A wrong candidate gets no ratio.

    Args:
        left_out: the candidates that are not run, and the failures that their rows have.

    Raises:
        DeviceLostError: a candidate fails, and after it the device fails every call.
    """
    rows: list[Row] = [{"name": one.name, "role": one.role, "function": one.function} for one in candidates]
    qualified: dict[str, QualifiedCandidate] = {}
    references: dict[str, Sequence[Results]] = {}

    @cache
    def fault_of_reference(function: str) -> str | None:
        """Why a function has no references, if so. The time that they take, and their failure, are no candidate's."""
        begin(None)
        try:
            references[function] = [case.reference(function, dtype) for dtype in (torch.float64, settings.dtype)]
        except Exception as error:  # memory may not suffice for them
            failure = f"{NO_REFERENCE}: {failure_of(error)}"
            check_device(settings.device, failure)
            return failure
        return None

    with fresh_compilation():
        for candidate, row in zip(candidates, rows, strict=True):
            if failure := left_out.get(candidate.name) or fault_of_reference(candidate.function):
                row["failure"] = failure
                continue
            try:
                begin(candidate.name)
                given = references[candidate.function]
                qualified[candidate.name] = qualify(candidate.prepare(case.problem), row, given, settings)
            except OverBudgetError as error:
                row["failure"] = f"{OVER_BUDGET}: {error}"
            except Exception as error:  # compilers and kernels raise exceptions of any type
                row["failure"] = failure_of(error)
                check_device(settings.device, row["failure"])
        time_qualified(qualified, case, settings, begin)
    add_ratios(rows)
    return rows


def failure_of(error: Exception) -> str:
    """The failure of a row."""
    return f"{type(error).__name__}: {first_line(error)}"


def qualify(
    call: Callable[[], Results], row: Row, references: Sequence[Results], settings: BenchmarkSettings
) -> QualifiedCandidate:
    """Makes the first call (which compiles), measures peak memory and checks the results.

    Raises:
        OverBudgetError: the first call took longer than the settings allow.
    """
    row["first_seconds"] = sample(call, 1, settings.device)
    if settings.budget is not None and row["first_seconds"] > settings.budget:
        raise OverBudgetError(f"its first call took {row['first_seconds']:.3g} s, more than {settings.budget:g} s")
    results: list[Results] = []
    row["peak_bytes"] = peak_memory(lambda: results.append(call()), settings.device)
    row["verdict"] = judge(results.pop(), *references)
    return QualifiedCandidate(row, call, references)


def time_qualified(
    qualified: dict[str, QualifiedCandidate], case: Case, settings: BenchmarkSettings, begin: Begin
) -> None:
    """Times all candidates that have passed their checks, and after a failure of one of them all others again.

    Raises:
        DeviceLostError: a candidate fails, and after it the device fails every call.
    """
    while qualified:
        begin(None)
        try:
            time_rounds(qualified, case, settings)
            break
        except CandidateError as error:
            name, failure = error.args
            row = qualified.pop(name).row
            row["failure"] = failure
            del row["verdict"]
            begin(name)
            check_device(settings.device, failure)


def time_rounds(qualified: Mapping[str, QualifiedCandidate], case: Case, settings: BenchmarkSettings) -> None:
    """Times the candidates in interleaved rounds, checks them again, and finishes their rows.

    Raises:
        CandidateError: one of them fails; the rows of all others can be finished without it.
    """
    repeats: dict[str, int] = {}
    samplers: dict[str, Callable[[], float]] = {}
    verdicts: dict[str, Verdict] = {}
    for name, one in qualified.items():
        with blaming(name):
            repeats[name] = calls_of_a_sample(one.call, settings.device, settings.sample_seconds)
        # As a decorator, a context manager encloses every later call of the function.
        samplers[name] = blaming(name)(partial(sample, one.call, repeats[name], settings.device))
    samples = interleave(samplers, settings.rounds, settings.budget)
    for name, one in qualified.items():
        with blaming(name):
            verdicts[name] = judge(one.call(), *one.references)
    for name, one in qualified.items():
        one.row["samples"] = samples[name]
        one.row["timing"] = asdict(summarize(samples[name], repeats[name]))
        finish_row(one.row, verdicts[name], case)


@contextmanager
def blaming(name: str) -> Iterator[None]:
    """Raises CandidateError with the candidate's name for whatever is raised in the block."""
    try:
        yield
    except Exception as error:  # kernels raise exceptions of any type
        raise CandidateError(name, failure_of(error)) from error


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
