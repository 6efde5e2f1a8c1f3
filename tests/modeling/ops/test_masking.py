"""Which keys a span of queries reaches by position, and which are hidden beside those of a given mask."""

import itertools

import pytest
import torch

from dynattn.modeling.ops.masking import Structure, split_mask, with_first_keys


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_span_reaches_the_keys_that_its_queries_see_and_no_others(is_causal: bool, window: int | None) -> None:
    """Outputs would not tell: keys beyond those are hidden, but only after they were read."""
    for keys, offset in itertools.product((4, 9), (None, 0, 2, 6)):
        structure = Structure(5, keys, is_causal, window, offset)
        for span in structure.query_spans(2):
            seen = structure.visible(span, slice(0, keys), torch.device("cpu")).any(dim=0).nonzero().flatten()
            reach = structure.reach(span)
            assert list(range(reach.start, reach.stop)) == seen.tolist()


@pytest.mark.parametrize("is_additive", [False, True])
def test_keys_before_the_first_are_hidden_beside_those_of_a_mask(is_additive: bool) -> None:
    given = torch.tensor([[True, True, False, True], [True, False, True, True]])[None, None]
    bias = torch.randn(given.shape).masked_fill(~given, -torch.inf)
    expected = given & torch.tensor([[False, True, True, True], [False, False, False, True]])
    found = with_first_keys(bias if is_additive else given, torch.tensor([[1, 3]]), 4, given.device)
    visible, added = split_mask(found)
    assert visible is not None and torch.equal(visible, expected)
    if is_additive:
        assert added is not None and torch.equal(added[expected], bias[expected])
