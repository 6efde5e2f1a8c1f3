"""The baselines compute the function that they are compared on."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cases.benchmark import inputs_of
from torch import Tensor

from dynattn.scripts.benchmark.baselines.dcmha import (
    attend_in_chunks,
    attend_whole,
    decode_with_matrices,
    key_matrix_cache,
    mixing_matrices,
)
from dynattn.scripts.benchmark.harness.inputs import (
    COMPOSED,
    PLAIN,
    STATIC,
    OpInputs,
    attend_by_reference,
    evaluate,
    reference_results,
    requiring_grad,
)


@pytest.mark.parametrize(("window", "is_causal"), [(None, True), (5, True), (150, True), (None, False)])
@pytest.mark.parametrize(
    ("attend", "function"),
    [(attend_in_chunks, COMPOSED), (attend_in_chunks, STATIC), (attend_in_chunks, PLAIN), (attend_whole, PLAIN)],
)
def test_baselines_equal_the_reference_op(
    attend: Callable[[OpInputs], Tensor], function: str, window: int | None, is_causal: bool
) -> None:
    inputs = requiring_grad(replace(inputs_of(function, 300, 300, window), is_causal=is_causal))
    expected = evaluate(attend_by_reference, inputs, backward=True)
    assert len(expected) == {PLAIN: 4, STATIC: 6, COMPOSED: 16}[function]
    torch.testing.assert_close(dict(evaluate(attend, inputs, backward=True)), dict(expected), atol=1e-11, rtol=1e-10)


def test_a_cache_of_matrices_decodes_what_the_reference_op_gives() -> None:
    inputs = inputs_of(COMPOSED, 1, 50)
    assert inputs.pre is not None and inputs.post is not None
    found = decode_with_matrices(
        inputs.query,
        inputs.key,
        inputs.value,
        mixing_matrices("query", inputs.pre, inputs.post),
        key_matrix_cache(inputs),
    )
    torch.testing.assert_close(found, attend_by_reference(inputs))
    in_chunks = reference_results(inputs, torch.float64, backward=False)["output"]
    torch.testing.assert_close(in_chunks, attend_by_reference(inputs))
    plain = replace(inputs, pre=None, post=None)
    torch.testing.assert_close(attend_whole(plain), attend_by_reference(plain))
