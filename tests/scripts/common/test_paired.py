"""Statistics over seeds, of which some may have diverged."""

import math

import pytest
from scipy import stats

from dynattn.scripts.common.paired import diverged, paired_difference, spread


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_a_run_that_diverged_leaves_no_mean_and_no_test(value: float | None):
    assert spread([1.0, value, 3.0]) == {"values": [1.0, None, 3.0], "mean": None, "sd": None}
    found = paired_difference([1.0, value, 3.5], [0.5, 1.0, 2.0])
    nothing = dict.fromkeys(("mean", "sd", "interval_95", "p"))
    assert found == {"values": [0.5, None, 1.5], **nothing}
    assert paired_difference([value] * 2, [value] * 2)["values"] == [None, None]
    assert diverged(found, [0, 7, 9]) == "diverged on seed 7"
    assert diverged(spread([value] * 2), [3, 4]) == "diverged on seeds 3, 4"
    assert diverged(spread([1.0, 2.0]), [3, 4]) == ""


def test_a_difference_has_the_interval_and_the_p_of_students_test():
    ours, others = [2.9, 3.4, 3.1, 3.3], [3.0, 3.9, 3.2, 3.6]
    found, test = paired_difference(ours, others), stats.ttest_rel(ours, others)
    assert found["p"] == pytest.approx(float(test.pvalue))
    assert found["interval_95"] == pytest.approx(list(test.confidence_interval(0.95)))


def test_a_spread_of_rounding_is_not_tested_and_a_small_one_is():
    others = [1.0, 2.0, 3.0]
    assert paired_difference([1.1, 2.1, 3.1], others)["p"] is None
    ours = [1.1, 2.1 + 1e-9, 3.1]
    assert paired_difference(ours, others)["p"] == pytest.approx(float(stats.ttest_rel(ours, others).pvalue))
