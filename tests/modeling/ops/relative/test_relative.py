"""Relative attention: every implementation against the definition, and the definition against its equation."""

import itertools
from functools import cache
from typing import Any

import pytest
import torch
from cases.largest_tensor import LargestTensor
from torch import Tensor

from dynattn import relative_attention
from dynattn.modeling.ops.relative import chunk as chunk_module
from dynattn.modeling.ops.relative import chunked as chunked_module
from dynattn.modeling.ops.relative.attention import RELATIVE_IMPLEMENTATIONS
from dynattn.modeling.ops.relative.eager import PositionTerms, relative_eager

BATCH, HEADS, WIDTH = 2, 3, 4
TERMS = {"all": (1, 1, 1), "embeddings": (1, 0, 0), "bias": (0, 1, 0), "content": (0, 0, 1), "none": (0, 0, 0)}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def inputs(queries: int, keys: int, terms: tuple[int, ...] = (1, 1, 1)) -> dict[str, Tensor | None]:
    return {
        "query": random(BATCH, HEADS, queries, WIDTH),
        "key": random(BATCH, HEADS, keys, WIDTH),
        "value": random(BATCH, HEADS, keys, WIDTH),
        "position_embeddings": random(keys + 2, HEADS, WIDTH) if terms[0] else None,
        "position_bias": random(keys + 2, HEADS) if terms[1] else None,
        "content_bias": random(HEADS, WIDTH) if terms[2] else None,
    }


def in_dtype(dtype: torch.dtype, given: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if one is None else one.to(dtype) for name, one in given.items()}


def run(given: dict[str, Tensor | None], implementation: str, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradients of a fixed random projection of it."""
    leaves = {name: x.clone().requires_grad_() for name, x in given.items() if x is not None}
    output = relative_attention(**{**given, **leaves}, implementation=implementation, **options)  # type: ignore[arg-type]
    weights = torch.randint(-4, 10, output.shape, generator=torch.Generator().manual_seed(1))  # exact in any dtype
    (output * weights).sum().backward()
    return output.detach(), {name: x.grad for name, x in leaves.items() if x.grad is not None}


def test_the_definition_is_the_equation() -> None:
    """Query by query and key by key, in plain loops."""
    given = inputs(3, 5)
    query, key, value, table, bias, content = given.values()
    output = relative_attention(**given, scaling=0.3, sliding_window=4, implementation="eager")  # type: ignore[arg-type]
    for b, h, t in itertools.product(range(BATCH), range(HEADS), range(3)):
        position = t + 2
        seen = [s for s in range(5) if 0 <= position - s < 4]
        scores = [
            0.3
            * (
                (query[b, h, t] + content[h]) @ key[b, h, s]
                + query[b, h, t] @ table[position - s, h]
                + bias[position - s, h]
            )
            for s in seen
        ]
        expected = torch.stack(scores).softmax(0) @ value[b, h, seen]
        torch.testing.assert_close(output[b, t, h], expected, atol=1e-12, rtol=0)


WINDOWS, MASKS = (None, 1, 9), (None, "boolean", "additive")
LENGTHS = ((1, 0), (1, 12), (20, 0), (20, 13), (63, 5), (100, 29))  # of queries, and of memory before them
# Every three of terms, window, mask and lengths meet in a case: the mask follows from the places of the other three.
CASES = [
    (terms, window, MASKS[(i + j + k) % len(MASKS)], *lengths)
    for i, terms in enumerate(TERMS)
    for j, window in enumerate(WINDOWS)
    for k, lengths in enumerate(LENGTHS)
]


@pytest.mark.parametrize("implementation", ["sdpa", "chunked"])
@pytest.mark.parametrize(("terms", "window", "mask", "queries", "memory"), CASES)
def test_outputs_and_gradients_are_those_of_the_definition(
    implementation: str,
    terms: str,
    window: int | None,
    mask: str | None,
    queries: int,
    memory: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunk_module, "CHUNK", 16)
    keys = queries + memory
    given = inputs(queries, keys, TERMS[terms])
    options: dict[str, Any] = {"sliding_window": window}
    if mask is not None:
        visible = torch.rand(BATCH, 1, 1, keys) > 0.3
        options["attention_mask"] = visible
        if mask == "additive":
            hidden = torch.finfo(torch.float64).min
            options["attention_mask"] = torch.where(visible, random(BATCH, 1, 1, keys), hidden)
    expected, expected_grads = run(given, "eager", **options)
    output, grads = run(given, implementation, **options)
    torch.testing.assert_close(output, expected, atol=1e-11, rtol=0)
    assert grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, atol=1e-10, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "chunked"])
def test_a_preallocated_cache_hides_what_is_not_written_yet(implementation: str) -> None:
    given = inputs(3, 7)
    cut = {**given, "key": given["key"][:, :, :5], "value": given["value"][:, :, :5]}  # type: ignore[index]
    given["key"][:, :, 5:] = torch.nan  # type: ignore[index]
    given["value"][:, :, 5:] = 0.0  # type: ignore[index]
    expected = relative_attention(**cut, implementation="eager")  # type: ignore[arg-type]
    output = relative_attention(**given, offset=torch.tensor(2), implementation=implementation)  # type: ignore[arg-type]
    if implementation == "sdpa":  # a NaN under an additive mask stays a NaN; written caches hold zeros
        given["key"][:, :, 5:] = 0.0  # type: ignore[index]
        output = relative_attention(**given, offset=torch.tensor(2), implementation="sdpa")  # type: ignore[arg-type]
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "chunked"])
def test_rows_that_see_nothing_are_zero_with_finite_gradients(implementation: str) -> None:
    given = inputs(6, 6)
    visible = torch.ones(BATCH, 1, 1, 6, dtype=torch.bool)
    visible[1, ..., :3] = False
    output, grads = run(given, implementation, attention_mask=visible)
    assert output[1, :3].abs().max() == 0
    assert output[1, 3:].abs().min() > 0
    assert all(grad.isfinite().all() for grad in grads.values())


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "chunked"])
def test_a_query_from_which_a_bias_hides_all_keys_gets_zeros(implementation: str) -> None:
    given = inputs(5, 5)
    given["position_bias"][0] = -torch.inf  # type: ignore[index]
    output, grads = run(given, implementation)
    assert not output[:, 0].any()
    torch.testing.assert_close(output[:, 1], given["value"][:, :, 0])  # type: ignore[index]
    assert all(grad.isfinite().all() for grad in grads.values())
    given["position_bias"][:] = -torch.inf  # type: ignore[index]
    output, grads = run(given, implementation)
    assert not output.any() and all(grad.isfinite().all() for grad in grads.values())


def test_a_gradient_that_an_additive_mask_would_not_get_is_refused() -> None:
    mask = torch.zeros(1, 1, 6, 6, dtype=torch.float64, requires_grad=True)
    for implementation in ("eager", "sdpa"):
        output = relative_attention(**inputs(6, 6), attention_mask=mask, implementation=implementation)  # type: ignore[arg-type]
        (grad,) = torch.autograd.grad(output.square().sum(), mask)
        assert grad.abs().sum() > 0
    with pytest.raises(ValueError, match="'chunked' has no gradient for attention_mask; detach it, or use 'eager'"):
        relative_attention(**inputs(6, 6), attention_mask=mask, implementation="chunked")  # type: ignore[arg-type]
    with torch.no_grad():
        relative_attention(**inputs(6, 6), attention_mask=mask, implementation="chunked")  # type: ignore[arg-type]


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "chunked"])
def test_nan_stays_in_its_row_of_the_batch(implementation: str) -> None:
    given = inputs(5, 5)
    expected = relative_attention(**given, implementation="eager")  # type: ignore[arg-type]
    given["query"][1, :, 2] = torch.nan  # type: ignore[index]
    output = relative_attention(**given, implementation=implementation)  # type: ignore[arg-type]
    wrong = output.isnan().any(-1).any(-1)
    assert wrong.nonzero().tolist() == [[1, 2]]
    torch.testing.assert_close(output[~wrong], expected[~wrong], atol=1e-12, rtol=0)


@pytest.mark.parametrize("mask", [None, "queries", "keys"])
@pytest.mark.parametrize(("queries", "keys"), [(9, 4), (40, 1), (70, 33), (5, 0)])
@pytest.mark.parametrize("implementation", ["sdpa", "chunked"])
def test_queries_before_the_first_key_see_nothing(
    implementation: str, queries: int, keys: int, mask: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_module, "CHUNK", 16)
    given = inputs(queries, keys)
    shape = (BATCH, 1, queries if mask == "queries" else 1, keys)
    options = {} if mask is None else {"attention_mask": torch.rand(shape) > 0.3}
    expected, expected_grads = run(given, "eager", **options)
    output, grads = run(given, implementation, **options)
    assert not output[:, : queries - keys].any()
    torch.testing.assert_close(output, expected, atol=1e-11, rtol=0)
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads.get(name, torch.zeros_like(grad)), grad, atol=1e-10, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_scaling_of_zero_weighs_all_visible_keys_alike(dtype: torch.dtype) -> None:
    given = {name: x.to(dtype) for name, x in inputs(65, 66).items() if x is not None}
    output, grads = run(given, "chunked", scaling=0.0, sliding_window=2)  # type: ignore[arg-type]
    mean = (given["value"][:, :, :-1] + given["value"][:, :, 1:]) / 2
    torch.testing.assert_close(output, mean.transpose(1, 2), atol=2e-2, rtol=2e-2)
    assert not grads["query"].any() and not grads["key"].any()


@pytest.mark.parametrize("shape", [(5,), (1,), (4, 5), (4, 1)])
@pytest.mark.parametrize("terms", [(0, 0, 0), (0, 0, 1)])
@pytest.mark.parametrize("implementation", ["sdpa", "chunked"])
def test_masks_may_have_few_dimensions(implementation: str, terms: tuple[int, ...], shape: tuple[int, ...]) -> None:
    given = inputs(4, 5, terms)
    options: dict[str, Any] = {"attention_mask": torch.rand(shape) > 0.3, "is_causal": False, "offset": 1}
    expected, _ = run(given, "eager", **options)
    torch.testing.assert_close(run(given, implementation, **options)[0], expected, atol=1e-11, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reason", ["one key", "equal values"])
def test_gradients_that_cancel_are_as_small_as_those_of_the_definition(reason: str, dtype: torch.dtype) -> None:
    given = {name: x.to(dtype) for name, x in inputs(70, 70).items() if x is not None}
    if reason == "equal values":
        given["value"][:] = given["value"][:, :, :1].clone()
    options = {"sliding_window": 1 if reason == "one key" else None}
    exact, double = run({name: x.double() for name, x in given.items()}, "eager", **options)[1], torch.float64
    errors = {}
    for name in ("eager", "chunked"):
        grads = run(given, name, **options)[1]  # type: ignore[arg-type]
        errors[name] = {leaf: (grads[leaf].to(double) - exact[leaf]).abs().max() for leaf in ("query", "key")}
    for leaf, error in errors["chunked"].items():
        assert error <= 2 * errors["eager"][leaf] + 1e-6


def test_dropping_everything_gives_zeros() -> None:
    for implementation, terms in itertools.product(RELATIVE_IMPLEMENTATIONS, TERMS.values()):
        given = inputs(20, 20, terms)
        assert not relative_attention(**given, dropout=1.0, implementation=implementation).any()  # type: ignore[arg-type]


def test_chunked_in_bfloat16_errs_no_more_than_the_definition() -> None:
    given = inputs(100, 140)
    exact = relative_attention(**given, implementation="eager")  # type: ignore[arg-type]
    half = {name: None if x is None else x.bfloat16() for name, x in given.items()}
    errors = {
        name: (relative_attention(**half, implementation=name).double() - exact).abs().max()  # type: ignore[arg-type]
        for name in ("eager", "chunked")
    }
    assert errors["chunked"] <= 2 * errors["eager"]


@pytest.mark.parametrize("is_causal", [True, False])
def test_dropout_of_chunks_is_a_mask_of_probabilities_with_its_gradients(
    is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the identity for values the output is the dropped probabilities, which tell the mask of a seed."""
    monkeypatch.setattr(chunk_module, "CHUNK", 16)
    monkeypatch.setattr(chunked_module, "FEW_PAIRS", 0)
    length, share = 48, 0.25
    table, bias = random(2 * length, HEADS, length), random(2 * length, HEADS)
    query, key, value = (random(BATCH, HEADS, length, length) * 0.2 for _ in range(3))
    given = {"query": query, "key": key, "value": value, "position_embeddings": table, "position_bias": bias}
    options: dict[str, Any] = {"is_causal": is_causal, "later_rows": length, "implementation": "chunked"}

    def drop(**changes: Tensor) -> Tensor:
        torch.manual_seed(3)
        return relative_attention(**{**given, **changes}, **options, dropout=share)  # type: ignore[arg-type]

    leaves = {name: one.clone().requires_grad_() for name, one in given.items()}
    terms = PositionTerms(leaves["position_embeddings"], leaves["position_bias"], later_rows=length)
    inputs_of_op = (leaves["query"], leaves["key"], leaves["value"])
    structure: dict[str, Any] = {"attention_mask": None, "is_causal": is_causal, "sliding_window": None}
    _, probs = relative_eager(*inputs_of_op, scaling=length**-0.5, **structure, terms=terms)
    identity = torch.eye(length, dtype=torch.float64).expand(BATCH, HEADS, -1, -1)
    kept = drop(value=identity).transpose(1, 2).ne(0)
    assert kept[probs > 0].double().mean().item() == pytest.approx(1 - share, abs=0.02)
    assert (kept[:, :, :16] != kept[:, :, 16:32])[(probs[:, :, :16] > 0) & (probs[:, :, 16:32] > 0)].any()
    for one, other in ((kept[0], kept[1]), (kept[:, 0], kept[:, 1])):  # rows of the batch, and heads
        differing = (one != other)[:, probs[0, 0] > 0]
        assert differing.double().mean().item() == pytest.approx(2 * share * (1 - share), abs=0.03)
    expected = ((probs * kept / (1 - share)) @ leaves["value"]).transpose(1, 2)
    output = drop(**leaves)
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=0)
    weights = torch.randn_like(output)
    found, wanted = (torch.autograd.grad(one, list(leaves.values()), weights) for one in (output, expected))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=0)


@pytest.mark.parametrize("queries", range(17, 33))
def test_a_last_chunk_of_any_size_has_its_window(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_module, "CHUNK", 16)
    given = inputs(queries, queries + 3)
    expected, _ = run(given, "eager", sliding_window=9)
    torch.testing.assert_close(run(given, "chunked", sliding_window=9)[0], expected, atol=1e-11, rtol=0)


def test_under_autocast_a_bias_without_embeddings_stays_exact() -> None:
    """As that of ALiBi, whose steps over some hundred are lost in bfloat16."""
    query, key, value = (torch.randn(1, 2, 300, 8) for _ in range(3))
    bias = -0.4 * (torch.arange(300) - 150).abs()[:, None].expand(300, 2) - 100
    given = {"query": query * 0, "key": key, "value": value, "position_bias": bias}
    exact = relative_attention(**{name: one.double() for name, one in given.items()}, implementation="eager")
    with torch.autocast("cpu", torch.bfloat16):
        found = relative_attention(**given, implementation="chunked")
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).abs().max() < 2**-6 * exact.abs().max()


@cache
def many_tokens() -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    """A call in bfloat16, long enough that its running sums would lose half a percent, and its exact gradients."""
    given = {name: None if one is None else 0.3 * one for name, one in inputs(1000, 1000).items()}
    low = in_dtype(torch.bfloat16, given)
    return low, run(in_dtype(torch.float64, low), "eager")[1]


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "chunked"])
def test_gradients_in_half_precision_do_not_lose_more_with_more_tokens(implementation: str) -> None:
    """A running sum in bfloat16 loses what each of many chunks, or pairs of a distance, adds to it."""
    low, exact = many_tokens()
    for name, ours in run(low, implementation)[1].items():
        assert (ours - exact[name]).norm() < 0.005 * exact[name].norm(), name


@pytest.mark.parametrize("implementation", ["sdpa", "chunked", "eager"])
def test_autocast_gives_its_dtype(implementation: str) -> None:
    given = in_dtype(torch.float32, inputs(9, 9))
    with torch.autocast("cpu", torch.bfloat16):
        assert run(given, implementation)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("terms", ["none", "content", "bias"])
@pytest.mark.parametrize("implementation", ["sdpa", "chunked"])
def test_an_offset_counts_with_any_terms(implementation: str, terms: str, offset: int) -> None:
    given = inputs(3, 7, TERMS[terms])
    expected, _ = run(given, "eager", offset=offset)
    torch.testing.assert_close(run(given, implementation, offset=offset)[0], expected, atol=1e-11, rtol=0)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "chunked"])
@pytest.mark.parametrize("embedded", [False, True])
def test_a_bias_in_float32_stays_exact_beside_half_precision(implementation: str, embedded: bool) -> None:
    """A bias of some hundred has steps of 1 and more in bfloat16."""
    query, key, value = (torch.randn(1, 2, 300, 8).bfloat16() for _ in range(3))
    query = query * (torch.arange(2) == 1)[:, None, None]  # without queries, only the bias tells keys apart
    given = {"position_embeddings": torch.randn(300, 2, 8).bfloat16() if embedded else None}
    found, expected = [], []
    for dtype, name, results in ((torch.bfloat16, implementation, found), (torch.float64, "eager", expected)):
        bias = (-0.4 * (torch.arange(300) - 150).abs()[:, None].expand(300, 2) - 100).clone()
        bias = bias.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        cast = {name: None if one is None else one.to(dtype) for name, one in given.items()}
        output = relative_attention(
            query.to(dtype),
            key.to(dtype),
            value.to(dtype),
            position_bias=bias,
            implementation=name,
            scaling=1.0,
            **cast,
        )
        output.square().sum().backward()
        results += [output.detach(), bias.grad]
    for one, truth in zip(found, expected, strict=True):
        assert (one - truth).abs().max() < 2**-6 * truth.abs().max()
    assert found[0].dtype == torch.bfloat16 and found[1].dtype == torch.float32


def test_chunked_allocates_nothing_of_queries_times_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of a forward and a backward pass is as large as one map of all queries and keys."""
    monkeypatch.setattr(chunk_module, "CHUNK", 16)
    given = inputs(512, 512)
    row, operand = 16 * BATCH * HEADS, 512 * WIDTH * BATCH * HEADS
    for window, limit in ((None, 512 * row), (32, operand)):
        with LargestTensor() as largest:
            run(given, "chunked", sliding_window=window)
        assert largest.elements <= limit < 512 * 512
    given |= {"position_embeddings": random(1024, HEADS, WIDTH), "position_bias": random(1024, HEADS)}
    for window, limit in ((None, (512 + 16) * row), (32, 2 * operand)):
        with LargestTensor() as largest:
            run(given, "chunked", sliding_window=window, is_causal=False, later_rows=512)
        assert largest.elements <= limit < 512 * 512


def test_sdpa_without_positions_allocates_nothing_of_queries_times_keys() -> None:
    given = inputs(600, 600, (0, 0, 1))
    with LargestTensor() as largest:
        run(given, "sdpa")
    assert largest.elements < 600 * 600


def test_later_keys_have_the_first_rows_of_the_tables() -> None:
    """Query by query and key by key, in plain loops, with a window on both sides and without."""
    given = inputs(3, 5)
    query, key, value, _, _, content = given.values()
    table, bias = random(5 + 3, HEADS, WIDTH), random(5 + 3, HEADS)
    for window in (None, 2):
        output = relative_attention(
            query,  # type: ignore[arg-type]
            key,  # type: ignore[arg-type]
            value,  # type: ignore[arg-type]
            position_embeddings=table,
            position_bias=bias,
            content_bias=content,
            is_causal=False,
            sliding_window=window,
            later_rows=3,
            implementation="eager",
        )
        for b, h, t in itertools.product(range(BATCH), range(HEADS), range(3)):
            seen = [s for s in range(5) if window is None or abs(t + 2 - s) < window]
            rows = [t + 2 - s + 3 for s in seen]
            products = (query[b, h, t] + content[h]) @ key[b, h, seen].T  # type: ignore[index]
            scores = (products + table[rows, h] @ query[b, h, t] + bias[rows, h]) * WIDTH**-0.5  # type: ignore[index]
            torch.testing.assert_close(output[b, t, h], scores.softmax(0) @ value[b, h, seen], atol=1e-12, rtol=0)  # type: ignore[index]


@pytest.mark.parametrize("implementation", ["sdpa", "chunked"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (20, 33), (33, 20), (1, 7), (40, 1), (5, 0)])
def test_tables_of_both_directions_give_the_outputs_and_gradients_of_the_definition(
    implementation: str,
    is_causal: bool,
    window: int | None,
    queries: int,
    keys: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunk_module, "CHUNK", 8)
    monkeypatch.setattr(chunked_module, "FEW_PAIRS", 0)
    given = inputs(queries, keys) | {
        "position_embeddings": random(keys + queries, HEADS, WIDTH),
        "position_bias": random(keys + queries + 3, HEADS),
    }
    options: dict[str, Any] = {"is_causal": is_causal, "sliding_window": window, "later_rows": queries}
    expected, expected_grads = run(given, "eager", **options)
    output, grads = run(given, implementation, **options)
    torch.testing.assert_close(output, expected, atol=1e-11, rtol=0)
    for name, grad in expected_grads.items():
        found = grads.get(name, torch.zeros_like(grad))
        torch.testing.assert_close(found, grad, atol=1e-10, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"query": random(2, 4, 3)}, r"query must be \[B, H, T, D\]"),
    ({"key": random(2, 1, 6, 4), "value": random(2, 1, 6, 4)}, "does not fit query"),
    ({"position_embeddings": random(5, 3, 4)}, "position_embeddings has 5 rows, but queries reach over 6 keys"),
    (
        {"position_embeddings": random(4, 3, 4), "attention_mask": torch.ones(6, dtype=torch.bool)},
        "position_embeddings has 4 rows, but queries reach over 6 keys",
    ),
    (
        {"later_rows": "2", "attention_mask": torch.ones(6, dtype=torch.bool)},
        "later_rows must be the number of rows for later keys, at least 0, not '2'",
    ),
    ({"position_bias": random(8, 4)}, r"position_bias of shape \(8, 4\) must be \[L, 3\]"),
    ({"content_bias": random(3, 5)}, r"content_bias of shape \(3, 5\) must be \[3, 4\]"),
    ({"sliding_window": 0}, "sliding_window must be at least 1"),
    (
        {"sliding_window": 2.5},
        r"sliding_window must be at least 1 \(the query itself\) and less than 2\*\*63, an integer, not 2.5",
    ),
    (
        {"sliding_window": True},
        r"sliding_window must be at least 1 \(the query itself\) and less than 2\*\*63, an integer, not True",
    ),
    ({"scaling": float("nan")}, "scaling must be a finite number, not nan"),
    ({"offset": 1.5}, "offset must be an integer, the position of the first query among the keys, not 1.5"),
    ({"offset": torch.tensor([1, 2])}, r"offset must be one integer, not \(2,\) of torch.int64"),
    ({"offset": 5}, "position_embeddings has 8 rows, but queries reach over 9 keys"),
    ({"dropout": 1.5}, "dropout must be a probability, from 0 to 1, not 1.5"),
    ({"dropout": float("nan")}, "dropout must be a probability, from 0 to 1, not nan"),
    ({"is_causal": False}, "is_causal=False does not go with position_embeddings: distances to later keys have no row"),
    ({"is_causal": False, "position_embeddings": None}, "is_causal=False does not go with position_bias"),
    (
        {"is_causal": False, "later_rows": 2},
        "position_embeddings has 6 rows, but queries reach over 6 keys, and 3 keys ahead, for which it has 2",
    ),
    ({"later_rows": -1}, "later_rows must be the number of rows for later keys, at least 0, not -1"),
    ({"later_rows": 3}, "position_embeddings has 5 rows, but queries reach over 6 keys; use fewer keys"),
    ({"position_bias": random(8, 3).long()}, "position_bias is torch.int64; cast it to torch.float64"),
    ({"position_embeddings": torch.tensor(1.0)}, r"position_embeddings of shape \(\) must be \[L, 3, 4\]"),
    ({"attention_mask": torch.ones(4, dtype=torch.bool)}, r"attention_mask \(4,\) does not broadcast to"),
    (
        {"implementation": "flash"},
        r"'flash' does not exist for relative attention; choose from \['chunked', 'eager', 'sdpa'\]",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_bad_calls_say_what_is_wrong(wrong: dict[str, Any], message: str) -> None:
    for implementation in (None, *RELATIVE_IMPLEMENTATIONS):
        with pytest.raises(ValueError, match=message):
            relative_attention(**{**inputs(4, 6), "implementation": implementation, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "chunked"])
def test_a_window_lets_tables_be_as_short_to_both_sides(implementation: str) -> None:
    """With a window of 4 a token sees 3 tokens after it."""
    given = inputs(30, 30)
    tables = {name: given[name][:7] for name in ("position_embeddings", "position_bias")}  # type: ignore[index]
    options: dict[str, Any] = {"is_causal": False, "sliding_window": 4, "implementation": implementation}
    output = relative_attention(**{**given, **tables}, **options, later_rows=3)  # type: ignore[arg-type]
    assert output.isfinite().all()
    with pytest.raises(ValueError, match="and 3 keys ahead, for which it has 2"):
        relative_attention(**{**given, **tables}, **options, later_rows=2)  # type: ignore[arg-type]


def test_a_window_lets_short_tables_serve_long_sequences() -> None:
    given = inputs(30, 30)
    short = {
        **given,
        "position_embeddings": given["position_embeddings"][:7],
        "position_bias": given["position_bias"][:7],
    }  # type: ignore[index]
    for implementation in ("eager", "sdpa", "chunked"):
        torch.testing.assert_close(
            relative_attention(**short, sliding_window=7, implementation=implementation),  # type: ignore[arg-type]
            relative_attention(**given, sliding_window=7, implementation="eager"),  # type: ignore[arg-type]
        )
