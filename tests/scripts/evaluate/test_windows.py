"""Windows of long texts."""

import math

import pytest

from dynattn.scripts.evaluate.windows import windows


@pytest.mark.parametrize("stride", [1, 7, 50])
def test_a_stride_predicts_every_token_once_from_full_windows(stride: int) -> None:
    tokens = list(range(400))
    inputs, targets = zip(*windows(tokens, 50, stride), strict=True)
    assert [token for window in targets for token in window] == tokens[1:]
    assert all(window == tokens[target[-1] - 50 : target[-1]] for window, target in zip(inputs, targets, strict=True))
    assert len(inputs) == 1 + math.ceil((399 - 50) / stride)
