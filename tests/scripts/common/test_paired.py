"""Statistics over seeds, of which some may have diverged."""

import math

import pytest

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
