"""The learning rate as a function of the step."""

import math
from dataclasses import asdict, replace

import pytest

from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain import PretrainArguments
from dynattn.scripts.pretrain.data.batch_order import block_within
from dynattn.scripts.pretrain.schedule import RateSchedule, build_schedule, keeps_past


def test_schedule_has_the_values_of_the_formula():
    schedule = RateSchedule(peak=2.0, warmup_steps=4, max_steps=15, min_ratio=0.1)
    assert [schedule(step) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert schedule(4) == 2.0
    assert schedule(9) == pytest.approx(0.2 + 1.8 / 2)
    assert schedule(14) == pytest.approx(0.2)
    quarter = 2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * 0.3)) / 2)
    assert schedule(7) == pytest.approx(quarter)
    assert RateSchedule(peak=1.0, warmup_steps=0, max_steps=1, min_ratio=0.1)(0) == 1.0


def test_weights_that_are_frozen_at_first_warm_up_from_there_on():
    schedule = RateSchedule(peak=2.0, warmup_steps=2, max_steps=11, min_ratio=0.0, first_step=4, shape="wsd")
    assert [schedule(step) for step in range(11)] == pytest.approx([0.0] * 4 + [1.0] + [2.0] * 4 + [1.0, 0.0])


def test_options_make_the_schedule_of_one_epoch():
    options = {"learning_rate": 0.5, "min_learning_rate_ratio": 0.2, "schedule": "wsd", "decay_share": 0.4}
    built = build_schedule(
        PretrainArguments(output="x", **options, freeze_parent_steps=3), pass_length=400, global_batch=4
    )
    assert built == RateSchedule(0.5, 2, 100, 0.2, first_step=3, shape="wsd", decay_share=0.4)


def test_more_passes_than_a_run_can_count_are_refused():
    with pytest.raises(UserError, match=r"epochs=1e\+300 are more than 2147483647 updates; lower it"):
        build_schedule(PretrainArguments(output="x", epochs=1e300), pass_length=100.0, global_batch=4)


def test_a_run_without_whole_sequences_is_refused():
    """It would never train the later positions, although `sequence_length` asks for them."""
    options = {"output": "x", "warmup_steps": 0, "length_warmup_steps": 9}
    assert build_schedule(PretrainArguments(**options, max_steps=10), 40, 4).max_steps == 10
    for length in ({"max_steps": 9}, {"epochs": 0.9}):
        with pytest.raises(UserError, match="length_warmup_steps=9 must be below the 9 updates of the run; lower it"):
            build_schedule(PretrainArguments(**options, **length), pass_length=40, global_batch=4)


def test_parts_of_a_pass_give_no_update_more_than_they_need():
    def updates(epochs: float, sequences: int, batch: int) -> int:
        return build_schedule(PretrainArguments(output="x", epochs=epochs), sequences, batch).max_steps

    assert 1.1 * 1600 / 32 > 55, "in floating point"
    assert [updates(1.1, sequences, 32) for sequences in (1570, 1600, 1601)] == [54, 55, 56]
    assert block_within(1.1 * 50 + 1.0 * 50, sources=2) == 105


def test_wsd_stays_at_the_peak_and_falls_in_a_straight_line():
    schedule = RateSchedule(2.0, warmup_steps=2, max_steps=21, min_ratio=0.1, shape="wsd", decay_share=0.5)
    rates = [schedule(step) for step in range(21)]
    assert rates[:2] == [1.0, 2.0]
    assert set(rates[1:11]) == {2.0}
    assert rates[11:] == pytest.approx([0.2 + 1.8 * left / 10 for left in range(9, -1, -1)])
    constant = replace(schedule, decay_share=0.0)
    assert {constant(step) for step in range(1, 21)} == {2.0}
    assert keeps_past(asdict(constant), asdict(replace(constant, max_steps=40)), 20)
    warming = RateSchedule(1.0, warmup_steps=9, max_steps=10, min_ratio=0.1, shape="wsd")
    assert [warming(step) for step in (7, 8, 9)] == pytest.approx([8 / 9, 0.55, 0.1])


def test_a_schedule_may_end_elsewhere_as_long_as_its_past_stays():
    long = RateSchedule(1.0, warmup_steps=2, max_steps=100, min_ratio=0.1, shape="wsd", decay_share=0.2)
    short = replace(long, max_steps=50)
    assert keeps_past(asdict(long), asdict(short), 40)
    assert not keeps_past(asdict(long), asdict(short), 45), "the shorter one has begun to fall"
    assert keeps_past(asdict(short), asdict(long), 40)
    ended = replace(long, max_steps=30, decay_share=0.0)
    assert keeps_past(asdict(long), asdict(ended), 29)
    assert not keeps_past(asdict(long), asdict(ended), 30), "nothing would be left to do"
    assert not keeps_past(asdict(replace(long, shape="cosine")), asdict(replace(short, shape="cosine")), 6)
    assert not keeps_past({}, asdict(short), 0)
