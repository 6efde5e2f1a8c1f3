"""The log-rank test, of one comparison of two groups of runs or of several at once."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import signal

# When each run of a group solved its task; None if it ended before that.
Group = Sequence[float | None]
# Scores are counted in parts of 1 / GRID. If the two groups have up to ten runs together, all are whole numbers of such
# parts, because they are sums of fractions whose denominators are at most ten.
GRID = math.lcm(*range(1, 11))


def log_rank(strata: Iterable[tuple[Group, Group]]) -> dict[str, float | None]:
    """The two-sided log-rank test of two groups, within each stratum (Mantel, Cancer Chemotherapy Reports 50, 1966).

    Strata are tasks whose times do not compare with one another: the deviations of all are added up. All runs that did
    not solve a task ended later than those that did.

    p is that of the permutation test: of all ways to deal the runs of each stratum to its two groups, the share whose
    deviation is as large as the actual one. The usual approximation by a normal distribution gives smaller values than
    any division of so few runs can have.

    Returns:
        `p`, None if all ways have the same deviation, for example because no run solved anything; and `deviation`: how
        many more runs of the first groups solved their tasks than would be expected if the groups were equal.
    """
    deviation, actual, rounding, ways = 0.0, 0, 0.0, 1
    lowest, shares, differ = 0, np.ones(1), False  # of the deviations, in parts of 1 / GRID
    for first, second in strata:
        scores = _scores([*first, *second])
        parts = np.rint(GRID * scores).astype(int)
        deviation += float(scores[: len(first)].sum())
        actual += int(parts[: len(first)].sum())
        rounding += float(abs(GRID * scores - parts).sum())
        ways *= math.comb(len(scores), len(first))
        start, more = _sums(parts, len(first))
        lowest, shares = lowest + start, signal.convolve(shares, more)
        differ = differ or bool(np.count_nonzero(more) > 1)
    if not differ:
        return {"p": None, "deviation": deviation}
    # Both of the deviations that are compared may be off by `rounding`, so for more than ten runs p may be a little
    # larger than the exact one, and is never smaller.
    as_large = abs(lowest + np.arange(len(shares))) >= abs(actual) - 2 * rounding
    # Convolving leaves errors of about 1e-16, which must not make p less than that of a single way.
    return {"p": max(float(shares[as_large].sum()), 1 / ways), "deviation": deviation}


def _scores(times: Group) -> NDArray[np.float64]:
    """What each run `[N]` adds to the deviation of its group: 1 if it solved its task, less what was expected of it.

    Each time at which d of n remaining runs solve the task adds d / n to what is expected of each of these n runs.
    """
    ends = np.array([math.inf if at is None else at for at in times])
    solved = np.isfinite(ends)
    hazards = {at: (ends == at).sum() / (ends >= at).sum() for at in set(ends[solved].tolist())}
    return solved - np.array([sum(hazard for at, hazard in hazards.items() if at <= end) for end in ends])


def _sums(parts: NDArray[np.int64], chosen: int) -> tuple[int, NDArray[np.float64]]:
    """The sums of all ways to choose as many of the numbers `parts` `[N]`.

    Returns:
        The lowest sum that is counted, and the shares of the ways that have it and each whole number that follows.
    """
    above = parts - parts.min()
    width = int(np.sort(above)[len(above) - chosen :].sum()) + 1
    ways = np.zeros((chosen + 1, width))  # by how many have been chosen, and by the sum of these
    ways[0, 0] = 1
    for number in above:
        ways[1:, number:] += ways[:-1, : max(0, width - number)]
    return chosen * int(parts.min()), ways[-1] / ways[-1].sum()
