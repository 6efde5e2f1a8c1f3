"""ALiBi: the slopes of the paper for any number of heads, and the bias by distance."""

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from dynattn.modeling.positions.alibi import alibi_bias, alibi_slopes


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 40])
def test_slopes_are_those_of_bloom(heads: int) -> None:
    by_key = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)  # [H, 1, S], slope times index of the key
    torch.testing.assert_close(alibi_slopes(heads, torch.device("cpu")), by_key[:, 0, 1], atol=0, rtol=1e-6)


def test_the_bias_falls_by_the_slope_with_every_token_of_distance() -> None:
    bias = alibi_bias(4, 6, torch.device("cpu"))
    slopes = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125])
    torch.testing.assert_close(bias, -torch.arange(4.0)[:, None] * slopes)
