"""A bias and a gain by distance in `dcmha_attention`: golden cases, the definition by a mask, memory, refusals."""

import sys
from typing import Any

import pytest
import torch
from cases.composed_op import Case, in_dtype, random_inputs, run
from cases.golden import read_case, tensors_under
from torch import Tensor

from dynattn import Composition, dcmha_attention
from dynattn.modeling.ops.dcmha.attention import COMPOSING_IMPLEMENTATIONS, IMPLEMENTATIONS
from dynattn.modeling.ops.distance_tables import at_distances, refusing_tables
from dynattn.modeling.ops.masking import key_distances

# What a golden case says by its name, in our arguments; cases of a single query name its place.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "after": {},
    "before": {"compose_position_bias": True},
    "after_window4": {"sliding_window": 4},
    "after_packed": {},
    "bias_only": {},
    "gain_only": {},
    "decode": {},
    "decode_offset5": {"offset": 5},
}
PLACES = {"decode": 8, "decode_offset5": 5}


@pytest.mark.parametrize("implementation", ["eager", "chunked"])
@pytest.mark.parametrize("name", OPTIONS)
def test_outputs_and_gradients_are_those_of_the_golden_case(name: str, implementation: str) -> None:
    _, tensors = read_case("positions_distance_tables")
    leaves = {key: value.requires_grad_() for key, value in tensors.items() if value.is_floating_point()}
    query, stages, options = leaves["query"], {}, dict(OPTIONS[name])
    if name != "plain":
        stages = {stage: Composition(**tensors_under(leaves, f"{stage}.")) for stage in ("pre", "post")}
    if name in PLACES:
        place = slice(PLACES[name], PLACES[name] + 1)
        query, stages = query[:, :, place], {key: stage.narrow(queries=place) for key, stage in stages.items()}
    if name == "after_packed":
        options["first_keys"] = tensors["first_keys"]
    tables = {"position_bias", "position_gain"} - {"bias_only": {"position_gain"}, "gain_only": {"position_bias"}}.get(
        name, set()
    )
    options |= {table: leaves[table] for table in tables}
    output = dcmha_attention(query, leaves["key"], leaves["value"], **stages, **options, implementation=implementation)
    torch.testing.assert_close(output, tensors[f"{name}.output"], atol=1e-14, rtol=1e-13)
    expected = tensors_under(tensors, f"{name}.grad.")
    if not expected:
        return
    upstream = torch.cos(torch.arange(output.numel(), dtype=torch.float64)).view_as(output)
    gradients = torch.autograd.grad(output, [leaves[key] for key in expected], upstream)
    for gradient, true in zip(gradients, expected.values(), strict=True):
        torch.testing.assert_close(gradient, true, atol=1e-14, rtol=1e-13)


@pytest.mark.parametrize("mask", [None, "bias"])
@pytest.mark.parametrize("implementation", [*sorted(COMPOSING_IMPLEMENTATIONS.keys() - {"triton"}), "sdpa"])
def test_without_composition_a_bias_is_an_additive_mask(implementation: str, mask: str | None) -> None:
    """Also beside a mask that is additive itself."""
    tensors, keywords = random_inputs(Case(40, 70, heads=(4, 2), stages=(), tables=("bias",), mask=mask))
    output, *gradients = run(tensors, keywords, implementation)
    by_distance = at_distances(keywords.pop("position_bias"), key_distances(40, 70, None, torch.device("cpu")))[None]
    given = keywords.get("attention_mask", 0.0)
    expected, *true = run(tensors, keywords | {"attention_mask": given + by_distance}, "eager")
    for ours, theirs in zip((output, *gradients), (expected, *true), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("implementation", ["eager", "chunked"])
def test_a_gain_of_ones_and_a_bias_of_zeros_change_nothing(implementation: str, queries: int) -> None:
    tensors, keywords = random_inputs(Case(queries, 70))
    expected = run(tensors, keywords, implementation)
    tables = {"position_bias": torch.zeros(70, 4).double(), "position_gain": torch.ones(70, 4).double()}
    for ours, theirs in zip(run(tensors, keywords | tables, implementation), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-14, rtol=1e-13)


@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize("implementation", ["eager", "chunked", "sdpa"])
def test_an_offset_that_is_a_tensor_is_the_number_in_it(implementation: str, queries: int) -> None:
    tensors, keywords = random_inputs(Case(queries, 70, stages=(), tables=("bias",), offset=20, window=11))
    expected = run(tensors, keywords, implementation)
    found = run(tensors, keywords | {"offset": torch.tensor(20)}, implementation)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("composed", [True, False])
@pytest.mark.parametrize(
    ("queries", "offset", "window", "is_causal"),
    [
        (1, 20, 11, True),
        (1, 0, 3, True),
        (1, 20, None, False),
        (1, 20, 11, False),
        (9, 20, 11, True),
        (70, 3, None, True),
        (70, 2, 5, True),
    ],
)
@pytest.mark.parametrize("implementation", ["chunked", "sdpa"])
def test_queries_at_an_offset_see_what_the_definition_shows(
    implementation: str,
    queries: int,
    offset: int,
    window: int | None,
    is_causal: bool,
    composed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing where the window ends before the first key that is there."""
    stages = {} if composed and implementation == "chunked" else {"stages": ()}
    tensors, keywords = random_inputs(Case(queries, 70, offset=offset, window=window, is_causal=is_causal, **stages))
    expected = run(tensors, keywords, "eager")
    for mode in ("auto", "0"):
        monkeypatch.setenv("DYNATTN_COMPILE", mode)
        for ours, theirs in zip(run(tensors, keywords, implementation), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("table", ["position_bias", "position_gain"])
def test_without_composition_tables_need_no_implementation_to_be_named(table: str) -> None:
    query, key, value = torch.randn(3, 1, 4, 9, 8).double().unbind()
    options: dict[str, Any] = {table: torch.rand(9, 4).double()}
    found = dcmha_attention(query, key, value, **options)
    torch.testing.assert_close(found, dcmha_attention(query, key, value, **options, implementation="eager"))


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_widest_window_hides_nothing(is_causal: bool) -> None:
    query, key, value = torch.randn(3, 1, 2, 9, 8).unbind()
    options: dict[str, Any] = {"pre": Composition(query_gate=torch.randn(1, 9, 2)), "is_causal": is_causal}
    found = dcmha_attention(query, key, value, **options, sliding_window=sys.maxsize, implementation="chunked")
    torch.testing.assert_close(found, dcmha_attention(query, key, value, **options, implementation="eager"))


@pytest.mark.parametrize("queries", [5, 6])
def test_a_bias_may_hide_distances_from_an_odd_number_of_queries(queries: int) -> None:
    """Keys that none of the queries sees get the gradients of the definition, not NaN."""
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(queries, 40)))
    bias = torch.zeros(40, tensors[0].shape[1])
    bias[8:] = -torch.inf
    keywords["position_bias"] = bias
    for ours, theirs in zip(run(tensors, keywords, "chunked"), run(tensors, keywords, "eager"), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("eager", torch.float64), ("sdpa", torch.float64), ("chunked", torch.float64), ("chunked", torch.float32)],
    ids=str,
)
def test_a_query_from_which_a_bias_hides_all_keys_gets_zeros(
    implementation: str, dtype: torch.dtype, queries: int, is_causal: bool
) -> None:
    query, key, value = (tensor.to(dtype).requires_grad_() for tensor in torch.randn(3, 1, 2, queries, 8).unbind())
    bias = torch.zeros(queries, 2, dtype=dtype)
    bias[0] = -torch.inf  # for the query itself and, without causality, later keys, which read the same row
    output = dcmha_attention(query, key, value, is_causal=is_causal, position_bias=bias, implementation=implementation)
    assert not output[:, 0].any()
    if queries > 1:  # the second query sees the first key only
        torch.testing.assert_close(output[:, 1], value[:, :, 0])
    gradients = torch.autograd.grad(output.sum(), (query, key, value))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_tables_in_float32_beside_half_precision_tell_far_distances_apart() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 600, 16) for _ in range(3))
    bias = -0.5 * torch.arange(600.0)[:, None].expand(-1, 2)
    exact = dcmha_attention(*(one.double() for one in (query, key, value)), position_bias=bias, implementation="eager")
    low = [one.bfloat16() for one in (query, key, value)]
    for implementation in ("eager", "chunked", "sdpa"):
        output = dcmha_attention(*low, position_bias=bias, implementation=implementation)
        assert output.dtype == torch.bfloat16
        noise = (dcmha_attention(*low, implementation="eager") - output).abs().max()
        assert noise > 0.1 and (output - exact).abs().max() < 0.03


def test_compiled_calls_take_tables() -> None:
    tensors, keywords = random_inputs(Case(70, 70, tables=("bias", "gain")))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(*given: Tensor) -> Tensor:
        options = keywords | {"position_bias": given[-2], "position_gain": given[-1]}
        return dcmha_attention(*given[:3], **options, implementation="chunked")

    output = attend(*tensors[:3], *tensors[-2:])
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).double()
    found = (output, *torch.autograd.grad(output, tensors, upstream))
    for ours, theirs in zip(found, run(tensors, keywords, "eager"), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


def test_a_table_needs_rows_only_for_the_keys_up_to_a_query_at_an_offset() -> None:
    query, key, value = torch.randn(1, 4, 1, 8), *torch.randn(2, 1, 4, 16, 8)
    bias = torch.randn(16, 4)
    long, short = (dcmha_attention(query, key, value, position_bias=table, offset=2) for table in (bias, bias[:3]))
    torch.testing.assert_close(short, long, atol=0, rtol=0)
    with pytest.raises(ValueError, match="position_bias has 2 rows, but queries reach over 3 keys"):
        dcmha_attention(query, key, value, position_bias=bias[:2], offset=2)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"position_bias": torch.zeros(6, 4)}, "position_bias has 6 rows, but queries reach over 7 keys"),
    ({"position_gain": torch.zeros(7, 2)}, r"position_gain of shape \(7, 2\) must be \[L, 4\]"),
    ({"position_bias": torch.zeros(0, 4)}, r"position_bias of shape \(0, 4\) must be \[L, 4\] with at least one row"),
    ({"position_bias": torch.zeros(7, 4).half()}, "position_bias is torch.float16; cast it to torch.float32"),
    ({"position_bias": torch.zeros(7, 4), "offset": 1.5}, "offset must be an integer"),
    ({"offset": torch.zeros(2, dtype=torch.long)}, "offset must be one integer"),
    ({"offset": torch.ones(1, 1, dtype=torch.long)}, r"offset must be one integer, not \(1, 1\) of torch.int64"),
    ({"offset": torch.tensor(True)}, r"offset must be one integer, not \(\) of torch.bool"),
    ({"offset": torch.tensor(1.5)}, r"offset must be one integer, not \(\) of torch.float32"),
    ({"offset": 3, "position_gain": torch.ones(7, 4)}, "position_gain has 7 rows, but queries reach over 10 keys"),
    ({"compose_position_bias": True, "position_gain": torch.ones(7, 4)}, "needs a position_bias to compose"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_does_not_fit_is_refused_with_what_would(options: dict[str, Any], message: str) -> None:
    query, key, value = (torch.randn(1, 4, 7, 8) for _ in range(3))
    with pytest.raises(ValueError, match=message):
        dcmha_attention(query, key, value, **options)


@pytest.mark.parametrize(
    "options", [{"position_bias": torch.zeros(7, 4)}, {"position_gain": torch.ones(7, 4)}, {"offset": 0}], ids=str
)
def test_an_implementation_without_tables_refuses_them_by_its_name(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> tuple[Tensor, None]:
        return query.transpose(1, 2), None

    monkeypatch.setitem(IMPLEMENTATIONS, "without", refusing_tables("without", without))
    query, key, value = (torch.randn(1, 4, 7, 8) for _ in range(3))
    with pytest.raises(ValueError, match=r"implementation='without' takes no position_bias.*use 'chunked'"):
        dcmha_attention(query, key, value, **options, implementation="without")
