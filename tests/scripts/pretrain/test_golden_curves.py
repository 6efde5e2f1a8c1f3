"""The loop and the models learn what they learned before: 200 updates of each family, with each implementation."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from cases.golden_curves import IMPLEMENTATIONS, read_curve, train
from cases.training import killed_after, losses

# The first updates with the default are quick.
CASES = [
    pytest.param(family, implementation, updates, marks=[pytest.mark.slow] * (updates is None))
    for family, names in IMPLEMENTATIONS.items()
    for implementation, updates in [("chunked", 60), *((name, None) for name in names)]
]


@pytest.mark.parametrize(("family", "implementation", "updates"), CASES)
def test_the_curve_is_the_golden_one(family: str, implementation: str, updates: int | None, tmp_path: Path):
    with killed_after(updates) if updates else nullcontext():
        train(tmp_path, family, implementation)
    found = losses(tmp_path / "run")
    expected, tolerances = (np.array(values) for values in read_curve(family))
    assert expected[0] - expected[-1] > 1, "the golden curve learns"
    assert tolerances.max() < 0.01 * (expected[0] - expected[-1]), "the tolerance is far below what is learned"
    assert len(found) == (updates - 1 if updates else len(expected))
    beyond = np.flatnonzero(abs(found - expected[: len(found)]) > tolerances[: len(found)])
    assert not beyond.size, f"from update {beyond[0] + 1}: {found[beyond[0]]} instead of {expected[beyond[0]]}"
