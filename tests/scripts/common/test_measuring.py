"""Samples, rounds and allocator high-water marks."""

import itertools
from collections.abc import Callable

import pytest
import torch
from cases.clock import Clock
from torch import Tensor

from dynattn.scripts.common import measuring
from dynattn.scripts.common.measuring import (
    LEAST_ROUNDS,
    MOST_CALLS,
    SLOW_SAMPLES,
    calls_of_a_sample,
    interleave,
    peak_memory,
    summarize,
)

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(measuring, "time", made)
    return made


@pytest.mark.parametrize(("budget", "rounds"), [(1.0, LEAST_ROUNDS), (4.0, 5)])
def test_samples_end_where_the_budget_does(budget: float, rounds: int, clock: Clock) -> None:
    samples = interleave({"slow": lambda: clock.work(1.0), "fast": lambda: 0.0}, rounds=8, budget=budget)
    assert {name: len(taken) for name, taken in samples.items()} == {"slow": rounds, "fast": 8}


def test_candidates_take_turns() -> None:
    order: list[str] = []

    def sampler(name: str) -> Callable[[], float]:
        def take() -> float:
            order.append(name)
            return float(len(order))

        return take

    samples = interleave({name: sampler(name) for name in "abc"}, rounds=3)
    assert "".join(order) == "abcabcabc"
    assert samples == {"a": [1.0, 4.0, 7.0], "b": [2.0, 5.0, 8.0], "c": [3.0, 6.0, 9.0]}


@pytest.mark.parametrize(
    ("first", "later", "calls"),
    [
        (1.0, 0.25, 8),  # one slow call does not shrink the sample
        (0.25, 1.0, 8),
        (0.75, 0.75, 3),
        (2.0 * SLOW_SAMPLES, 1.0, 2),
        (2.0 * SLOW_SAMPLES + 1.0, 1.0, 1),  # which no interruption explains
        (0.0, 0.0, MOST_CALLS),
    ],
)
def test_a_sample_has_the_calls_that_fill_its_time(first: float, later: float, calls: int, clock: Clock) -> None:
    durations = itertools.chain([first], itertools.repeat(later))
    assert calls_of_a_sample(lambda: clock.work(next(durations)), CPU, seconds=2.0) == calls


def test_a_summary_has_median_minimum_and_spread() -> None:
    timing = summarize([5.0, 1.0, 3.0, 2.0, 4.0], calls=7)
    assert (timing.n, timing.calls, timing.median, timing.minimum, timing.spread) == (5, 7, 3.0, 1.0, 2.0)
    assert summarize([2.0], calls=1).spread == 0


def test_peak_memory_counts_temporaries_and_results_but_not_what_was_there() -> None:
    there = torch.ones(2**18)  # 1 MiB

    def call() -> Tensor:
        temporary = there + 1
        larger = torch.cat([temporary, temporary])
        del temporary
        return larger[:1].clone()

    assert peak_memory(call, CPU) == pytest.approx(3 * 2**20, rel=0.01)
