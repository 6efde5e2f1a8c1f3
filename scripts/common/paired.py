"""Statistics over seeds: spread, paired differences, and corrections for several comparisons.

Values that are None, NaN or infinite are those of runs that diverged.
"""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from scipy import stats

# Standard deviations below this are rounding.
ROUNDING = 1e-12


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean and sample standard deviation; the latter is None for a single value.

    If a run diverged, its value is None, and so are both: the mean of the other runs would say nothing about all.
    """
    finite = [value if value is not None and math.isfinite(value) else None for value in values]
    known = [value for value in finite if value is not None]
    if len(known) < len(finite):
        return {"values": finite, "mean": None, "sd": None}
    return {"values": known, "mean": statistics.mean(known), "sd": statistics.stdev(known) if len(known) > 1 else None}


def spread_in_words(summary: Mapping[str, Any], form: str) -> str:
    """The mean of a `spread` in a format such as ".4f", with ± the standard deviation if there is one."""
    return " ± ".join(format(number, form) for number in (summary["mean"], summary["sd"]) if number is not None)


def diverged(summary: Mapping[str, Any], seeds: Sequence[int]) -> str:
    """Which of the seeds of a `spread` diverged, such as "diverged on seeds 0, 2"; empty if none did."""
    gone = [seed for seed, value in zip(seeds, summary["values"], strict=True) if value is None]
    return f"diverged on {name_seeds(gone)}" if gone else ""


def name_seeds(seeds: Sequence[int]) -> str:
    """The seeds in words, such as "seeds 0, 2"."""
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def paired_difference(values: Sequence[float | None], others: Sequence[float | None]) -> dict[str, Any]:
    """`values` minus `others`, seed by seed, with a two-sided paired t-test.

    The interval and p are None for a single seed, if a run diverged, and for differences that are equal up to rounding,
    which have no spread to test against.
    """
    pairs = zip(values, others, strict=True)
    differences = [None if value is None or other is None else value - other for value, other in pairs]
    summary = {**spread(differences), "interval_95": None, "p": None}
    if summary["sd"] is not None and summary["sd"] > ROUNDING:
        test = stats.ttest_rel(values, others)
        interval = test.confidence_interval(0.95)
        summary |= {"interval_95": [float(interval.low), float(interval.high)], "p": float(test.pvalue)}
    return summary


def interval_in_words(summary: Mapping[str, Any], form: str) -> str:
    """The interval of a `paired_difference` with limits in a format such as "+.4f"; empty where there is none."""
    return " to ".join(format(limit, form) for limit in summary["interval_95"] or ())


def mean_in_words(summary: Mapping[str, Any], form: str) -> str:
    """The mean of a `paired_difference`, and its interval in brackets if there is one."""
    interval = interval_in_words(summary, form)
    return format(summary["mean"], form) + (f" ({interval})" if interval else "")


def p_in_words(p: float | None) -> str:
    """A p value with two digits; empty where nothing was tested."""
    return "" if p is None else f"{p:.2g}"


def add_holm(tests: Collection[dict[str, Any]]) -> None:
    """Adds to each test `p_holm`, its `p` corrected by `holm` over all of them."""
    for test, corrected in zip(tests, holm([test["p"] for test in tests]), strict=True):
        test["p_holm"] = corrected


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Corrects the p values of several comparisons so that the chance of any false positive is that of a single one.

    Holm's step-down procedure (Scandinavian Journal of Statistics 6, 1979). Comparisons whose p value is None are not
    counted, and stay None.
    """
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        corrected[index] = largest
    return corrected
