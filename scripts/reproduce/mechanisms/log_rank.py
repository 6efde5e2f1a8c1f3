"""The log-rank test, of one comparison of two groups of runs or of several at once."""

from collections.abc import Iterable, Sequence

from scipy import stats

# When each run of a group solved its task; None if it did not until it ended.
Group = Sequence[float | None]


def log_rank(strata: Iterable[tuple[Group, Group]]) -> dict[str, float | None]:
    """The two-sided log-rank test of two groups, within each stratum (Mantel, Cancer Chemotherapy Reports 50, 1966).

    Strata are tasks whose times do not compare with one another: the deviations of all are added up, and so are their
    variances. All runs that did not solve a task ended later than those that did.

    Returns:
        `p`, None if no run solved anything, because then there is nothing to test; and `deviation`, by how many the
        runs of the first groups that solved their tasks exceed what equal groups would have shown.
    """
    deviation = variance = 0.0
    for first, second in strata:
        for time in {at for at in (*first, *second) if at is not None}:
            here, there = _at_risk(first, time), _at_risk(second, time)
            solved, both = [*first, *second].count(time), here + there
            deviation += list(first).count(time) - solved * here / both
            variance += solved * here * there * (both - solved) / (both**2 * max(1, both - 1))
    if variance == 0:
        return {"p": None, "deviation": deviation}
    return {"p": float(2 * stats.norm.sf(abs(deviation) / variance**0.5)), "deviation": deviation}


def _at_risk(group: Group, time: float) -> int:
    return sum(at is None or at >= time for at in group)
