"""Windows of long texts."""

import math

import pytest

from dynattn.scripts.evaluate.windows import segments, windows


@pytest.mark.parametrize("stride", [1, 7, 50])
def test_a_stride_predicts_every_token_once_from_full_windows(stride: int) -> None:
    tokens = list(range(400))
    inputs, targets = zip(*windows(tokens, 50, stride), strict=True)
    assert [token for window in targets for token in window] == tokens[1:]
    assert all(window == tokens[target[-1] - 50 : target[-1]] for window, target in zip(inputs, targets, strict=True))
    assert len(inputs) == 1 + math.ceil((399 - 50) / stride)


@pytest.mark.parametrize("length", [1, 3, 7, 50])
def test_segments_lie_side_by_side_and_predict_every_token_once(length: int) -> None:
    tokens = list(range(8))
    inputs, targets = zip(*segments(tokens, length), strict=True)
    assert [token for segment in inputs for token in segment] == tokens[:-1]
    assert [token for segment in targets for token in segment] == tokens[1:]
    assert [len(segment) for segment in targets[:-1]] == [length] * (7 // length - (7 % length == 0))
