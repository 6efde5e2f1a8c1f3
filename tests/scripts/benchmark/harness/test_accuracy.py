"""Verdicts on results."""

import math

import pytest
import torch

from dynattn.scripts.benchmark.harness.accuracy import judge


def test_a_result_of_another_shape_is_wrong_although_it_broadcasts() -> None:
    exact = {"output": torch.ones(2, 3, dtype=torch.float64)}
    reference = {"output": torch.ones(2, 3)}
    assert judge(reference, exact, reference).correct
    assert not judge({"output": torch.ones(3)}, exact, reference).correct
    assert not judge({}, exact, reference).correct


def test_a_gradient_that_is_zero_but_for_rounding_is_judged_by_the_references_own_rounding() -> None:
    exact = {"output": torch.ones(4, dtype=torch.float64), "grad bias": torch.full((4,), 1e-17, dtype=torch.float64)}
    reference = {"output": torch.ones(4), "grad bias": torch.full((4,), 1e-7)}
    assert judge({"output": torch.ones(4), "grad bias": torch.full((4,), -2e-7)}, exact, reference).correct
    assert not judge({"output": torch.ones(4), "grad bias": torch.full((4,), 1e-5)}, exact, reference).correct


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("wide", [False, True], ids=["measured", "float64"])
def test_nothing_is_judged_by_a_reference_that_is_not_finite(value: float, wide: bool) -> None:
    """Whatever a candidate has there, its error is nothing beside an infinite one."""
    exact = {"output": torch.ones(4, dtype=torch.float64), "grad query": torch.ones(4, dtype=torch.float64)}
    reference = {"output": torch.ones(4, dtype=torch.float16), "grad query": torch.ones(4, dtype=torch.float16)}
    (exact if wide else reference)["grad query"][0] = value
    results = {"output": torch.ones(4), "grad query": torch.full((4,), 1234.0)}
    message = f"grad query of the reference op is not finite in {'float64' if wide else 'float16'}"
    with pytest.raises(FloatingPointError, match=message):
        judge(results, exact, reference)
