"""Statistics over seeds, of which some may have diverged."""

import math

import pytest

from dynattn.scripts.common.paired import (
    diverged,
    interval_in_words,
    mean_in_words,
    p_in_words,
    paired_difference,
    spread,
    spread_in_words,
)


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


def test_the_paired_test_has_the_numbers_of_its_closed_form():
    """Differences 1, 2 and 3: t = 2 sqrt 3 on 2 degrees of freedom, for which p = 1 - t / sqrt(2 + t * t)."""
    found, t = paired_difference([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]), 2 * math.sqrt(3)
    assert (found["mean"], found["sd"]) == (2, 1)
    assert found["p"] == pytest.approx(1 - t / math.sqrt(2 + t * t))
    half = 4.302652729911275 / math.sqrt(3)
    assert found["interval_95"] == pytest.approx([2 - half, 2 + half])


def test_one_seed_and_a_spread_of_rounding_are_not_tested_and_a_small_spread_is():
    assert paired_difference([2.0], [1.0]) == {"values": [1.0], "mean": 1.0, "sd": None, "interval_95": None, "p": None}
    others = [1.0, 2.0, 3.0]
    assert paired_difference([1.1, 2.1, 3.1], others)["p"] is None
    assert paired_difference([1.1, 2.1 + 1e-9, 3.1], others)["p"] < 0.01


def test_words_leave_out_what_was_not_measured():
    """The interval of differences 1, 2 and 3 is 2 ± 4.3027 / sqrt 3."""
    found, alone = paired_difference([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]), paired_difference([2.0], [1.0])
    assert [interval_in_words(one, "+.2f") for one in (found, alone)] == ["-0.48 to +4.48", ""]
    assert [mean_in_words(one, "+.2f") for one in (found, alone)] == ["+2.00 (-0.48 to +4.48)", "+1.00"]
    assert [p_in_words(one["p"]) for one in (found, alone)] == ["0.074", ""]
    assert [spread_in_words(spread(values), ".1f") for values in ([1.0, 3.5, 3.0], [1.0])] == ["2.5 ± 1.3", "1.0"]
