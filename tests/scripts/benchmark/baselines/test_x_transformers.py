"""The baseline of another package computes the function that it is compared on, where it is installed."""

import pytest
import torch
from cases.benchmark import inputs_of

from dynattn.scripts.benchmark.baselines import x_transformers
from dynattn.scripts.benchmark.harness.inputs import STATIC, attend_by_reference, evaluate, requiring_grad
from dynattn.scripts.benchmark.subjects import attention


def test_its_talking_heads_equal_the_reference_op() -> None:
    pytest.importorskip("x_transformers")
    inputs = requiring_grad(inputs_of(STATIC, 100, 100))
    expected = evaluate(attend_by_reference, inputs, backward=True)
    found = evaluate(x_transformers.attend, inputs, backward=True)
    # Its softmax is in float32, whatever the dtype.
    torch.testing.assert_close(dict(found), dict(expected), atol=2e-6, rtol=1e-5)


def test_it_has_no_window() -> None:
    with pytest.raises(ValueError, match="x-transformers' talking heads have no sliding window"):
        x_transformers.attend(inputs_of(STATIC, 10, 10, 5))


@pytest.mark.parametrize("installed", [False, True])
def test_it_is_a_candidate_where_it_is_installed(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(x_transformers, "is_installed", lambda: installed)
    names = [one.name for one in attention.candidates(torch.device("cpu"))]
    assert ("x-transformers" in names) == installed
