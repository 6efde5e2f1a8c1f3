"""A part of the soak; `make soak` does the rest."""

from pathlib import Path

import pytest

from .soak import soak


@pytest.mark.slow
@pytest.mark.parametrize(("faults", "worlds"), [(12, [1]), (6, [1, 2])])
def test_a_run_that_is_disturbed_again_and_again_ends_where_the_undisturbed_one_does(
    faults: int, worlds: list[int], tmp_path: Path
) -> None:
    record = soak(tmp_path, faults, worlds, seed=faults)
    assert record["same"], record
    assert record["injected"] == faults, record
