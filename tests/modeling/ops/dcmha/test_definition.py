"""The attention op against the matrix form of composition, written out pair by pair."""

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases.composed_op import random_composition
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dynattn import Composition, dcmha_attention
from dynattn.modeling.layers.attention_interface import attention_function
from dynattn.modeling.ops.dcmha.attention import COMPOSING_IMPLEMENTATIONS, IMPLEMENTATIONS, Attention
from dynattn.modeling.ops.dcmha.composition import from_list, list_tensors, pack_factors, unpack_factors
from dynattn.modeling.ops.dcmha.eager import compose

TERMS = ("query_low_rank", "key_low_rank", "query_gate", "key_gate", "static")


def mixing_matrix(c: Composition, b: int, t: int, s: int, heads: int) -> Tensor:
    """`Wfull` of one (query, key) pair: out[m] = sum_n in[n] Wfull[n, m]."""
    full = torch.eye(heads, dtype=torch.float64)
    if c.static is not None:
        full = full + c.static
    group = torch.arange(heads) // (heads // c.groups)
    same_group = (group[:, None] == group[None, :]).double()
    for down, up, index in ((c.query_down, c.query_up, t), (c.key_down, c.key_up, s)):
        if down is not None and up is not None:
            full = full + same_group * torch.einsum("rn,rm->nm", down[b, index], up[b, index])
    for gate, index in ((c.query_gate, t), (c.key_gate, s)):
        if gate is not None:
            full = full + torch.diag(gate[b, index])
    return full


def compose_by_pairs(scores: Tensor, c: Composition | None) -> Tensor:
    if c is None:
        return scores
    composed = torch.empty_like(scores)
    batch, heads, queries, keys = scores.shape
    for b, t, s in itertools.product(range(batch), range(queries), range(keys)):
        composed[b, :, t, s] = scores[b, :, t, s] @ mixing_matrix(c, b, t, s, heads)
    return composed


def attention_by_pairs(
    query: Tensor, key: Tensor, value: Tensor, pre: Composition | None, post: Composition | None, visible: Tensor
) -> Tensor:
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = compose_by_pairs(query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5, pre)
    probs = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1).nan_to_num(0.0)
    return (compose_by_pairs(probs, post) @ value).transpose(1, 2)


def causal(queries: int, keys: int, window: int | None) -> Tensor:
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    return (distance >= 0) & (distance < (window or keys))


def random_inputs(batch: int, heads: int, kv_heads: int, queries: int, keys: int, width: int) -> list[Tensor]:
    shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    return [torch.randn(batch, h, length, width, dtype=torch.float64) for h, length in shapes]


@settings(max_examples=60, deadline=None)
@given(
    terms=st.sets(st.sampled_from(TERMS)),
    stages=st.sampled_from([("pre",), ("post",), ("pre", "post")]),
    heads=st.sampled_from([(2, 2), (4, 2), (6, 1)]),
    rank=st.integers(1, 3),
    queries=st.integers(1, 5),
    past=st.integers(0, 4),
    window=st.one_of(st.none(), st.integers(1, 6)),
    implementation=st.sampled_from(["eager", "chunked"]),
)
def test_every_switch_equals_the_pairwise_definition(
    terms: set[str],
    stages: tuple[str, ...],
    heads: tuple[int, int],
    rank: int,
    queries: int,
    past: int,
    window: int | None,
    implementation: str,
) -> None:
    keys = queries + past
    query, key, value = random_inputs(2, *heads, queries, keys, 4)
    composition = {stage: random_composition(terms, 2, queries, keys, heads[0], rank) for stage in stages}
    pre, post = composition.get("pre"), composition.get("post")
    output = dcmha_attention(
        query, key, value, pre=pre, post=post, sliding_window=window, implementation=implementation
    )
    expected = attention_by_pairs(query, key, value, pre, post, causal(queries, keys, window))
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_groups_mix_only_inside_themselves(groups: int) -> None:
    query, key, value = random_inputs(2, 6, 6, 5, 5, 4)
    plain = random_composition(set(TERMS) - {"static"}, 2, 5, 5, 6, 2)
    pre = post = replace(plain, groups=groups)
    output = dcmha_attention(query, key, value, pre=pre, post=post)
    expected = attention_by_pairs(query, key, value, pre, post, causal(5, 5, None))
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=1e-10)


def test_gradients_of_every_input_by_finite_differences() -> None:
    query, key, value = random_inputs(1, 4, 2, 3, 4, 2)
    pre, post = (random_composition(set(TERMS), 1, 3, 4, 4, 2) for _ in range(2))

    def attend(*tensors: Tensor) -> Tensor:
        before, after = from_list(tensors[3:10], groups=1), from_list(tensors[10:], groups=1)
        return dcmha_attention(*tensors[:3], pre=before, post=after, sliding_window=3)

    inputs = [query, key, value, *(tensor for c in (pre, post) for tensor in list_tensors(c) if tensor is not None)]
    assert torch.autograd.gradcheck(attend, [tensor.requires_grad_() for tensor in inputs])


@pytest.mark.parametrize("terms", [set(TERMS), {"query_low_rank", "key_gate"}, {"static"}, set()], ids=sorted)
def test_what_is_packed_is_unpacked(terms: set[str]) -> None:
    composition = replace(random_composition(terms, 2, 3, 5, 4, 2), groups=2)
    *sides, static = pack_factors(composition)
    packed = {side: tensor for side, tensor in zip(("query", "key"), sides, strict=True) if tensor is not None}
    unpacked = unpack_factors(packed, static, groups=2)
    assert unpacked.groups == 2
    assert_equal_factors(unpacked.tensors(), composition.tensors())
    assert all(again is before for again, before in zip(pack_factors(unpacked), (*sides, static), strict=True))


def test_narrowing_takes_the_factors_of_some_queries_and_keys() -> None:
    composition = random_composition(set(TERMS), 2, 3, 5, 4, 2)
    narrowed = composition.narrow(queries=slice(1, 2), keys=slice(-2, None)).tensors()
    expected = {
        name: tensor[:, 1:2] if name.startswith("query") else tensor if name == "static" else tensor[:, 3:]
        for name, tensor in composition.tensors().items()
    }
    assert_equal_factors(narrowed, expected)
    assert_equal_factors(composition.narrow().tensors(), composition.tensors())


def assert_equal_factors(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(ours) == list(expected)
    assert all(torch.equal(ours[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("composed", [True, False])
@pytest.mark.parametrize("additive", [True, False])
def test_rows_without_a_visible_key_give_zeros_and_finite_gradients(composed: bool, additive: bool) -> None:
    query, key, value = (tensor.float().requires_grad_() for tensor in random_inputs(2, 4, 4, 5, 5, 4))
    visible = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    visible[0, :, :, :2] = False  # left padding: the first two queries of the first row see nothing
    mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min) if additive else visible
    pre = Composition(query_gate=torch.randn(2, 5, 4)) if composed else None
    output = dcmha_attention(query, key, value, pre=pre, attention_mask=mask)
    assert torch.equal(output[0, :2], torch.zeros_like(output[0, :2]))
    assert output[0, 2:].abs().min() > 0
    output.sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (query, key, value))


def test_an_additive_mask_biases_the_composed_scores() -> None:
    query, key, value = random_inputs(1, 2, 2, 4, 4, 4)
    pre = random_composition({"query_low_rank"}, 1, 4, 4, 2, 1)
    bias = torch.randn(1, 2, 4, 4, dtype=torch.float64)
    output = dcmha_attention(query, key, value, pre=pre, attention_mask=bias)
    scores = compose_by_pairs(query @ key.transpose(-1, -2) / 2, pre) + bias
    probs = torch.softmax(scores.masked_fill(~causal(4, 4, None), -torch.inf), -1)
    torch.testing.assert_close(output, (probs @ value).transpose(1, 2))


def test_without_composition_it_is_torchs_own_attention() -> None:
    query, key, value = random_inputs(2, 4, 2, 7, 7, 8)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)
    for implementation in (None, "eager", "sdpa"):
        output = dcmha_attention(query, key, value, implementation=implementation)
        torch.testing.assert_close(output, expected, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("window", [None, 3])
def test_plain_attention_aligns_queries_to_the_end(kv_heads: int, window: int | None) -> None:
    query, key, value = random_inputs(2, 4, kv_heads, 3, 8, 4)
    expected = attention_by_pairs(query, key, value, None, None, causal(3, 8, window))
    torch.testing.assert_close(dcmha_attention(query, key, value, sliding_window=window), expected)


def test_bad_calls_say_what_is_wrong() -> None:
    query, key, value = random_inputs(2, 4, 4, 3, 5, 4)
    gate = Composition(query_gate=torch.zeros(2, 3, 4))
    cases = [
        ({"implementation": "fast"}, f"'fast' does not exist; choose from {re.escape(str(sorted(IMPLEMENTATIONS)))}"),
        ({"implementation": "sdpa", "pre": gate}, "'sdpa' cannot compose heads; use 'eager' or 'chunked'"),
        ({"pre": Composition(query_down=torch.zeros(2, 3, 1, 4))}, "query_down and query_up come together"),
        (
            {"post": Composition(key_gate=torch.zeros(2, 3, 4))},
            r"post.key_gate has shape .*; expected \(2, 5, 4\)",
        ),
        ({"sliding_window": 0}, "sliding_window must be at least 1"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            dcmha_attention(query, key, value, **arguments)
    with pytest.raises(ValueError, match="does not fit query"):
        dcmha_attention(query, key[:, :3], value[:, :3])
    with pytest.raises(ValueError, match=r"query must be \[B, H, T, D\]"):
        dcmha_attention(query[0], key, value)


BATCH, HEADS, QUERIES, KEYS, WIDTH, RANK = 2, 6, 3, 11, 4, 2
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"mask": torch.ones(2, 1, 1, 4, dtype=torch.bool)}, r"attention_mask \(2, 1, 1, 4\) does not broadcast to"),
    ({"mask": torch.ones(3, 1, 1, 11, dtype=torch.bool)}, r"does not broadcast to \[B, H, T, S\] = \(2, 6, [13], 11\)"),
    ({"mask": torch.ones(1, 2, 1, 1, 11, dtype=torch.bool)}, r"attention_mask \(.*1, 11\) does not broadcast"),
    ({"mask": torch.ones(2, 1, 1, 11, dtype=torch.long)}, r"attention_mask is torch.int64; use a boolean one"),
    ({"key_up": torch.ones(2, 11, 3, 6)}, r"key_up has shape \(2, 11, 3, 6\); expected \(2, 11, 2, 6\), the shape of"),
    ({"key_down": torch.ones(2, 11, 6)}, r"key_down has shape \(2, 11, 6\); expected \(2, 11, R, 6\) with a rank R"),
    ({"key_gate": torch.ones(2, 11, 1, 6)}, r"key_gate has shape \(2, 11, 1, 6\); expected \(2, 11, 6\)"),
    ({"key_gate": torch.ones(3, 11, 6)}, r"key_gate has shape \(3, 11, 6\); expected \(2, 11, 6\)"),
    ({"key_gate": torch.ones(2, 11, 4)}, r"key_gate has shape \(2, 11, 4\); expected \(2, 11, 6\)"),
    ({"key_gate": torch.ones(2, 11, 6, dtype=torch.double)}, "key_gate is torch.float64; cast it to torch.float32"),
    ({"static": torch.ones(6, 1, 6)}, r"static has shape \(6, 1, 6\); expected \(6, 6\)"),
    ({"static": torch.ones(6, 6, dtype=torch.long)}, "static is torch.int64; cast it to torch.float32"),
    ({"static": torch.ones(6, 6, device="meta")}, "pre.static is on meta; move it to cpu, the device of query"),
    ({"value": torch.ones(2, 6, 11, 4, device="meta")}, "value is on meta; move it to cpu, the device of query"),
    ({"mask": torch.ones(1, 1, 1, 11, dtype=torch.bool, device="meta")}, "attention_mask is on meta; move it to cpu"),
    (
        {"mask": torch.ones(1, 1, 1, 11, dtype=torch.bool).to_sparse()},
        r"attention_mask is torch.sparse_coo; attention takes dense tensors, as .to_dense\(\) makes them",
    ),
    ({"value": torch.ones(2, 6, 11, 4).to_sparse()}, "value is torch.sparse_coo; attention takes dense"),
    ({"static": torch.eye(6).to_sparse()}, "pre.static is torch.sparse_coo; attention takes dense"),
    *(
        ({"groups": groups}, f"groups must be a positive integer that divides the 6 heads, not {groups}")
        for groups in (4, 0, -2, 12, 1.5)
    ),
    ({"key": torch.ones(2, 0, 11, 4), "value": torch.ones(2, 0, 11, 4)}, "must have at least one head"),
    ({"value": torch.ones(2, 6, 11, 4).double()}, "are torch.float32, torch.float32 and torch.float64; cast them"),
    ({"window": 0}, "sliding_window must be at least 1"),
    (
        {"window": -1},
        r"sliding_window must be at least 1 \(the query itself\) and less than 2\*\*63, an integer, not -1",
    ),
    ({"window": 2**63}, r"less than 2\*\*63, an integer, not 9223372036854775808; None hides no key"),
    ({"window": 2.0}, "an integer, not 2.0"),
    ({"window": float("nan")}, "an integer, not nan"),
    ({"scaling": float("nan")}, "scaling must be a finite number, not nan; None takes"),
    ({"scaling": float("inf")}, "scaling must be a finite number, not inf"),
    ({"scaling": "0.5"}, "scaling must be a finite number, not '0.5'"),
    ({"first_keys": torch.zeros(1, 3, dtype=torch.long)}, r"first_keys must be integers \(2, [13]\)"),
]


@pytest.mark.parametrize("queries", [1, QUERIES])
@pytest.mark.parametrize(("wrong", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_every_way_to_an_implementation_refuses(wrong: dict[str, Any], message: str, queries: int) -> None:
    """Some of these calls read memory that is not theirs, or never ended."""
    calls = [
        lambda arguments, name=name: dcmha_attention(**arguments, implementation=name)
        for name in COMPOSING_IMPLEMENTATIONS
    ]
    calls += [
        lambda arguments, attend=attend: through_interface(attend, arguments)
        for attend in COMPOSING_IMPLEMENTATIONS.values()
    ]
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call(wrong_arguments(wrong, queries))


def wrong_arguments(wrong: dict[str, Any], queries: int) -> dict[str, Any]:
    """The arguments of the op, with these values in the place of some; factors are those of both stages."""
    factors: dict[str, Any] = {"static": torch.randn(HEADS, HEADS)}
    for side, length in (("query", queries), ("key", KEYS)):
        factors |= {f"{side}_{kind}": torch.randn(BATCH, length, RANK, HEADS) for kind in ("down", "up")}
        factors[f"{side}_gate"] = torch.randn(BATCH, length, HEADS)
    given = {name: value for name, value in wrong.items() if name in (*factors, "groups")}
    stage = Composition(**{**factors, **given})
    return {
        "query": torch.randn(BATCH, HEADS, queries, WIDTH),
        "key": wrong.get("key", torch.randn(BATCH, HEADS, KEYS, WIDTH)),
        "value": wrong.get("value", torch.randn(BATCH, HEADS, KEYS, WIDTH)),
        "pre": stage,
        "post": stage,
        "attention_mask": wrong.get("mask"),
        "sliding_window": wrong.get("window"),
        "scaling": wrong.get("scaling", 0.5),
        "first_keys": wrong.get("first_keys"),
    }


def through_interface(attend: Attention, arguments: dict[str, Any]) -> None:
    """Calls an implementation as Transformers' attention interface does."""
    attention_function(attend)(nn.Module(), is_causal=True, **arguments)


@pytest.mark.parametrize("queries", [1, 5])
def test_float32_factors_serve_heads_in_half_precision(queries: int) -> None:
    query, key, value = (tensor.bfloat16() for tensor in random_inputs(2, 4, 2, queries, 5, 4))
    stage = random_composition(set(TERMS), 2, queries, 5, 4, 2).map(lambda factor: factor.float())
    output, expected = (
        dcmha_attention(query, key, value, pre=stage, post=stage, implementation=name) for name in ("chunked", "eager")
    )
    assert output.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected, atol=0.05, rtol=0.05)


def test_factors_in_float32_keep_their_precision_beside_half_precision() -> None:
    """They are rounded neither before they multiply nor in the sum."""
    scores = torch.randn(2, 4, 5, 7).bfloat16()
    composition = random_composition(set(TERMS), 2, 5, 7, 4).map(lambda factor: factor.detach().float())
    found = compose(scores, composition)
    assert found.dtype == torch.float32
    exact = compose(scores.double(), composition.map(lambda factor: factor.double()))
    torch.testing.assert_close(found.double(), exact, atol=1e-5 * float(exact.abs().max()), rtol=0)
