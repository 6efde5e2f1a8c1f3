"""`dcmha_attention(..., return_maps=...)`: every map of a call, and who cannot return them."""

import doctest
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from cases.composed_op import Case, random_inputs

import dynattn
from dynattn import AttentionMaps, dcmha_attention
from dynattn.modeling.ops.dcmha import attention
from dynattn.modeling.ops.distance_tables import at_distances
from dynattn.modeling.ops.masking import key_distances

NAMES = AttentionMaps._fields


def test_the_maps_follow_from_one_another() -> None:
    tensors, keywords = random_inputs(Case(12, 20, heads=(4, 2), mask="pairs", window=9))
    query, key, value = tensors[:3]
    output, maps = dcmha_attention(query, key, value, **keywords, return_maps=NAMES)
    assert torch.equal(output, dcmha_attention(query, key, value, **keywords, implementation="eager"))
    scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) * 8**-0.5
    torch.testing.assert_close(maps.scores, scores)
    unmasked = {"pre": keywords["pre"], "is_causal": False, "return_maps": ("composed_scores",)}
    torch.testing.assert_close(maps.composed_scores, dcmha_attention(query, key, value, **unmasked)[1].composed_scores)
    visible = maps.probs > 0
    hidden = maps.composed_scores.masked_fill(~visible, -torch.inf)
    torch.testing.assert_close(maps.probs, torch.softmax(hidden, -1).nan_to_num(0.0))
    assert not maps.composed_probs[~visible].any()
    assert maps.composed_probs.min() < 0
    torch.testing.assert_close((maps.composed_probs @ value.repeat_interleave(2, 1)).transpose(1, 2), output)


def test_without_composition_both_maps_of_a_stage_are_the_same_and_probabilities_are_some() -> None:
    query, key, value = torch.randn(3, 2, 4, 10, 8).unbind()
    output, maps = dcmha_attention(query, key, value, return_maps=NAMES)
    assert maps.scores is maps.composed_scores
    assert torch.equal(maps.probs, maps.composed_probs)
    torch.testing.assert_close(maps.probs.sum(-1), torch.ones(2, 4, 10))
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(output, expected.transpose(1, 2))


@pytest.mark.parametrize("compose_position_bias", [False, True])
def test_tables_change_the_maps_after_those_that_name_what_they_act_on(compose_position_bias: bool) -> None:
    """A bias that is not composed acts on composed scores, and a gain on probabilities; neither shows in those."""
    query, key, value = torch.randn(3, 2, 4, 10, 8).double().unbind()
    bias, gain = torch.randn(10, 4).double(), torch.rand(10, 4).double()
    tables = {"position_bias": bias, "position_gain": gain, "compose_position_bias": compose_position_bias}
    output, maps = dcmha_attention(query, key, value, **tables, return_maps=NAMES)
    spread = at_distances(bias, key_distances(10, 10, None, query.device))
    torch.testing.assert_close(maps.scores, query @ key.mT * 8**-0.5)
    torch.testing.assert_close(maps.composed_scores, maps.scores + spread if compose_position_bias else maps.scores)
    torch.testing.assert_close(maps.probs.sum(-1), torch.ones(2, 4, 10).double())
    gained = maps.probs * at_distances(gain, key_distances(10, 10, None, query.device))
    torch.testing.assert_close(maps.composed_probs, gained)
    torch.testing.assert_close((gained @ value).transpose(1, 2), output)


def test_maps_that_nobody_asked_for_are_none() -> None:
    query, key, value = torch.randn(3, 1, 2, 5, 4).unbind()
    _, maps = dcmha_attention(query, key, value, return_maps=["probs"], implementation="eager")
    assert [name for name in NAMES if getattr(maps, name) is not None] == ["probs"]


@pytest.mark.parametrize(
    ("asked", "implementation", "message"),
    [
        (("probs", "weights"), None, "return_maps has ['weights']; it must be a tuple with some of ('scores', "),
        ("probs", None, "return_maps has 'probs'; it must be a tuple"),
        (("probs",), "chunked", "implementation='chunked' keeps no maps to return; use 'eager', or None"),
        (("probs",), "triton", "implementation='triton' keeps no maps to return; use 'eager', or None"),
        (("probs",), "sdpa", "implementation='sdpa' keeps no maps to return; use 'eager', or None"),
    ],
)
def test_what_cannot_be_returned_is_refused(asked: object, implementation: str | None, message: str) -> None:
    query, key, value = torch.randn(3, 1, 2, 5, 4).unbind()
    with pytest.raises(ValueError, match=re.escape(message)):
        dcmha_attention(query, key, value, return_maps=asked, implementation=implementation)


def test_the_example_of_a_post_mod_computes_what_it_says() -> None:
    example = doctest.DocTestParser().get_doctest(
        attention.dcmha_attention.__doc__ or "",
        {"torch": torch, "dynattn": dynattn, "itertools": itertools},
        "post_mod",
        None,
        None,
    )
    assert len(example.examples) == 7
    assert doctest.DocTestRunner().run(example).failed == 0
