"""The table of a study in Markdown, made from its record."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..common import markdown
from .record import Run, final, loss_unit

EMPTY: tuple[str, ...] = ("", "", "")
METRICS = {"loss": "validation loss", "bits_per_byte": "bits per byte"}


def table(record: Mapping[str, Any]) -> str:
    """The study in Markdown: a row for the parents if there are any, a row for each arm, and notes on how to read it.

    There are columns for bits per byte, losses at equal time, and ratios of tokens and FLOPs if they were measured.
    """
    compared = record["comparison"]
    timed = all("equal_seconds" in comparison for comparison in compared.values())
    arms = record["arms"].values()
    measured = [
        name for name in METRICS if any(value is not None for arm in arms for value in final(arm["runs"], name))
    ]
    head = ["", "parameters", *(METRICS[name] for name in measured), "difference", "95 % interval", "p"]
    head += ["difference at equal time", "tokens the baseline needs"] if timed else []
    counted = timed and all(comparison.get("operations_ratio") for comparison in compared.values())
    head += ["operations the baseline needs"] if counted else []
    head += ["tokens/s"]
    rows = []
    if record["parents"]:
        sizes = _sizes("parent, before", record["parents"], measured)
        rows.append([*sizes, *[""] * (len(head) - len(sizes))])
    for name, arm in record["arms"].items():
        speed = statistics.median(run["tokens_per_second"] for run in arm["runs"])
        cells = _difference(compared.get(name)) + (_efficiency(compared.get(name), counted) if timed else [])
        rows.append([*_sizes(arm["label"], arm["runs"], measured), *cells, f"{speed:,.0f}"])
    return f"{markdown.table(head, rows)}\n\n{_reading(record, timed)}"


def _sizes(label: str, runs: Sequence[Run], measured: Sequence[str]) -> list[str]:
    return [label, f"{runs[0]['parameters']:,}", *(_spread(final(runs, name)) for name in measured)]


def _spread(values: Sequence[float | None]) -> str:
    """Mean and standard deviation, or nothing where nothing was measured."""
    measured = [value for value in values if value is not None]
    return f"{statistics.mean(measured):.4f} ± {statistics.stdev(measured):.4f}" if measured else ""


def _difference(comparison: Mapping[str, Any] | None) -> list[str]:
    if comparison is None:
        return list(EMPTY)
    p = comparison.get("p_holm", comparison["p"])
    return [f"{comparison['mean']:+.4f}", _interval(comparison, "+.4f"), "" if p is None else f"{p:.2g}"]


def _efficiency(comparison: Mapping[str, Any] | None, counted: bool) -> list[str]:
    if comparison is None:
        return list(EMPTY[: 2 + counted])
    timed = comparison["equal_seconds"]
    ratios = [comparison["token_ratio"], *([comparison["operations_ratio"]] if counted else [])]
    return [
        f"{timed['mean']:+.4f} ({_interval(timed, '+.4f')})",
        *(f"{ratio['mean']:.2f} x ({_interval(ratio, '.2f')})" for ratio in ratios),
    ]


def _interval(summary: Mapping[str, Any], form: str) -> str:
    """An interval, or nothing where differences are all the same and have no spread."""
    return " to ".join(format(limit, form) for limit in summary["interval_95"] or ())


def _reading(record: Mapping[str, Any], timed: bool) -> str:
    arms = record["arms"]
    baseline = next(iter(arms.values()))
    targets = " or ".join(f"{number:,}" for number in record["validation_targets"])
    tokens = f"{baseline['runs'][0]['tokens']:,}"
    spent = f"{record['parents'][0]['tokens']:,} tokens for each parent, then {tokens}" if record["parents"] else tokens
    count = len(record["comparison"])
    corrected = any("p_holm" in comparison for comparison in record["comparison"].values())
    comparisons = f"{count} comparison{'s' * (count > 1)}"
    correction = f"corrected for {comparisons} (Holm)" if corrected else f"not corrected for {comparisons}"
    equal_time = (
        "At equal time: when the faster of the two has ended, by the median speed of training. Tokens (and operations) "
        "the baseline needs, as a multiple of the arm's, for the worse of their last losses. "
    )
    quoted = record.get("quoted")
    line = f" Quoted: {quoted['label']}, {quoted['source']}." if quoted else ""
    return (
        f"Mean ± standard deviation over {len(baseline['runs'])} seeds (initial weights and order of the data); "
        f"{spent} tokens for each row; loss in {loss_unit(record)} on {targets} held-out tokens. Difference: paired by "
        f"seed, from {baseline['label']}; p of a two-sided paired t-test, {correction}. {equal_time if timed else ''}"
        f"{_learning_rates(record)} Tokens are equal; parameters and computation are not.{line}"
    )


def _learning_rates(record: Mapping[str, Any]) -> str:
    grid, tuning_seed = record["settings"]["learning_rates"], record["settings"]["tuning_seed"]
    tuned = len(grid or ()) > 1
    choice = f"chosen on seed {tuning_seed} from {', '.join(f'{rate:g}' for rate in grid)}" if tuned else "not tuned"
    rates = "; ".join(f"{arm['label']} {arm['runs'][0]['learning_rate']:g}" for arm in record["arms"].values())
    return f"Learning rates ({choice}): {rates}."
