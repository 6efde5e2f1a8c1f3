"""Causality and sliding windows by position: which keys a span of queries reaches."""

import itertools

import pytest
import torch

from dynattn.modeling.ops.masking import Structure


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
