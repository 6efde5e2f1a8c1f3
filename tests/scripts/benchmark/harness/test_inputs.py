"""Inputs of the op: compositions that matter, and the reference results for them."""

from dataclasses import replace

import pytest
import torch
from cases.benchmark import inputs_of

from dynattn.scripts.benchmark.harness.inputs import (
    COMPOSED,
    attend_by_reference,
    evaluate,
    reference_results,
    requiring_grad,
)


@pytest.mark.parametrize("window", [None, 40])
def test_the_reference_in_chunks_is_the_reference(window: int | None) -> None:
    inputs = inputs_of(COMPOSED, 300, 300, window)
    expected = evaluate(attend_by_reference, requiring_grad(inputs), backward=True)
    found = reference_results(inputs, torch.float64, backward=True)
    torch.testing.assert_close(dict(found), dict(expected), atol=1e-11, rtol=1e-10)
    assert reference_results(inputs, torch.float32, backward=True)["grad query"].dtype == torch.float32


def test_composition_of_the_inputs_matters() -> None:
    """A baseline that dropped a term would otherwise pass."""
    inputs = inputs_of(COMPOSED, 64, 64)
    assert inputs.pre is not None and inputs.post is not None
    whole = attend_by_reference(inputs)
    for stage, composition in (("pre", inputs.pre), ("post", inputs.post)):
        for term in (("query_down", "query_up"), ("key_down", "key_up"), ("query_gate",), ("key_gate",)):
            without = replace(inputs, **{stage: replace(composition, **dict.fromkeys(term))})
            assert (attend_by_reference(without) - whole).norm() > 0.02 * whole.norm()
