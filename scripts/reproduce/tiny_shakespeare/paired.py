"""Statistics over seeds."""

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
    """`values` minus `others`, seed by seed, with a two-sided paired t-test; interval and p are None for a
    single seed.

    They are also None for differences that are equal up to rounding, because these have no spread.
    """
    differences = [value - other for value, other in zip(values, others, strict=True)]
    summary = {**spread(differences), "interval_95": None, "p": None}
    if summary["sd"] is not None and summary["sd"] > ROUNDING:
        test = stats.ttest_rel(values, others)
        interval = test.confidence_interval(0.95)
        summary |= {"interval_95": [float(interval.low), float(interval.high)], "p": float(test.pvalue)}
    return summary
