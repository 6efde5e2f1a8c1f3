"""Pooling over tokens, in half precision and with padding."""

import re
from typing import Any

import pytest
import torch

from dynattn.modeling.common.pooling import first_token, mean_of_tokens


def test_a_mean_over_many_tokens_in_float16_is_finite() -> None:
    hidden, mask = torch.full((1, 8192, 2), 9.0, dtype=torch.float16), torch.ones(1, 8192, dtype=torch.long)
    mean = mean_of_tokens(hidden, mask)
    assert mean.dtype == torch.float16 and (mean == 9).all()


def test_only_shown_tokens_count() -> None:
    hidden, mask = torch.arange(10.0).reshape(2, 5, 1), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 1, 0]])
    assert mean_of_tokens(hidden, mask).tolist() == [[3.0], [pytest.approx(19 / 3)]]
    assert mean_of_tokens(hidden, mask, prefix=1).tolist() == [[3.0], [7.0]]
    assert first_token(hidden, mask).tolist() == [[2.0], [5.0]]
    assert first_token(hidden, None).tolist() == [[0.0], [5.0]]


def test_the_mean_over_no_token_is_zero() -> None:
    hidden = torch.ones(2, 3, 4, requires_grad=True)
    mean = mean_of_tokens(hidden, torch.tensor([[1, 0, 0], [1, 1, 0]]), prefix=1)
    assert mean.tolist() == [[0.0] * 4, [1.0] * 4]
    mean.sum().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()


@pytest.mark.parametrize("mask", [torch.ones(2, 1, 5, 5), {"full_attention": None}], ids=["4-D", "prepared"])
def test_a_mean_needs_to_know_the_real_tokens(mask: Any) -> None:
    with pytest.raises(
        ValueError, match=re.escape("needs a mask [B, T] to know the real tokens; give one, or use 'cls'")
    ):
        mean_of_tokens(torch.zeros(2, 5, 3), mask)
