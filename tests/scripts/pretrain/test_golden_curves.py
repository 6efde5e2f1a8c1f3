"""The loop and the models learn what they learned before: 200 updates of each family, with each implementation."""

from pathlib import Path

import numpy as np
import pytest
from cases.golden_curves import IMPLEMENTATIONS, read_curve, train

# The suite trains with the default; the others take as long each.
CASES = [
    pytest.param(family, implementation, marks=[pytest.mark.slow] * (implementation != "chunked"))
    for family, names in IMPLEMENTATIONS.items()
    for implementation in names
]


@pytest.mark.parametrize(("family", "implementation"), CASES)
def test_the_curve_is_the_golden_one(family: str, implementation: str, tmp_path: Path):
    expected, tolerances = (np.array(values) for values in read_curve(family))
    losses = np.array(train(tmp_path, family, implementation))
    assert expected[0] - expected[-1] > 1, "the golden curve learns"
    assert tolerances.max() < 0.01 * (expected[0] - expected[-1]), "the tolerance is far below what is learned"
    beyond = np.flatnonzero(abs(losses - expected) > tolerances)
    assert not beyond.size, f"from update {beyond[0] + 1}: {losses[beyond[0]]} instead of {expected[beyond[0]]}"
