"""Statistics over seeds: spread, paired differences, and corrections for several comparisons."""

import statistics
from collections.abc import Sequence
from typing import Any

from scipy import stats

# Standard deviations below this are rounding.
ROUNDING = 1e-12


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean and sample standard deviation; the latter is None for a single value."""
    sd = statistics.stdev(values) if len(values) > 1 else None
    return {"values": list(values), "mean": statistics.mean(values), "sd": sd}


def paired_difference(values: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """`values` minus `others`, seed by seed, with a two-sided paired t-test.

    The interval and p are None for a single seed, and for differences that are equal up to rounding, which have no
    spread to test against.
    """
    differences = [value - other for value, other in zip(values, others, strict=True)]
    summary = {**spread(differences), "interval_95": None, "p": None}
    if summary["sd"] is not None and summary["sd"] > ROUNDING:
        test = stats.ttest_rel(values, others)
        interval = test.confidence_interval(0.95)
        summary |= {"interval_95": [float(interval.low), float(interval.high)], "p": float(test.pvalue)}
    return summary


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
