"""Samples, rounds and allocator high-water marks."""

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dynattn.scripts.common.measuring import (
    LEAST_ROUNDS,
    MOST_CALLS,
    calls_of_a_sample,
    interleave,
    peak_memory,
    summarize,
)

CPU = torch.device("cpu")


def test_samples_end_where_the_budget_does() -> None:
    samples = interleave({"slow": lambda: time.sleep(0.02) or 0.0, "fast": lambda: 0.0}, rounds=8, budget=0.01)
    assert {name: len(taken) for name, taken in samples.items()} == {"slow": LEAST_ROUNDS, "fast": 8}


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


def test_one_slow_call_does_not_shrink_the_samples() -> None:
    calls = []

    def call() -> None:
        calls.append(None)
        time.sleep(0.1 if len(calls) == 1 else 0.001)

    assert calls_of_a_sample(call, CPU, seconds=0.02) > 5
    assert calls_of_a_sample(lambda: None, CPU, seconds=1.0) == MOST_CALLS


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
