"""Relative attention: every implementation against the definition, and the definition against its equation."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from dynattn import relative_attention
from dynattn.modeling.ops.relative import chunked as chunked_module

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


def run(given: dict[str, Tensor | None], implementation: str, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradients of a fixed random projection of it."""
    leaves = {name: x.clone().requires_grad_() for name, x in given.items() if x is not None}
    output = relative_attention(**{**given, **leaves}, implementation=implementation, **options)  # type: ignore[arg-type]
    weights = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1))
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


@pytest.mark.parametrize("implementation", ["sdpa", "chunked"])
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("mask", [None, "boolean", "additive"])
@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize(("queries", "memory"), [(1, 0), (1, 12), (20, 0), (20, 13), (63, 5), (100, 29)])
def test_outputs_and_gradients_are_those_of_the_definition(
    implementation: str,
    terms: str,
    mask: str | None,
    window: int | None,
    queries: int,
    memory: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunked_module, "CHUNK", 16)
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
def test_nan_stays_in_its_row_of_the_batch(implementation: str) -> None:
    given = inputs(5, 5)
    expected = relative_attention(**given, implementation="eager")  # type: ignore[arg-type]
    given["query"][1, :, 2] = torch.nan  # type: ignore[index]
    output = relative_attention(**given, implementation=implementation)  # type: ignore[arg-type]
    wrong = output.isnan().any(-1).any(-1)
    assert wrong.nonzero().tolist() == [[1, 2]]
    torch.testing.assert_close(output[~wrong], expected[~wrong], atol=1e-12, rtol=0)


def test_chunked_in_bfloat16_errs_no_more_than_the_definition() -> None:
    given = inputs(100, 140)
    exact = relative_attention(**given, implementation="eager")  # type: ignore[arg-type]
    half = {name: None if x is None else x.bfloat16() for name, x in given.items()}
    errors = {
        name: (relative_attention(**half, implementation=name).double() - exact).abs().max()  # type: ignore[arg-type]
        for name in ("eager", "chunked")
    }
    assert errors["chunked"] <= 2 * errors["eager"]


def test_chunked_drops_the_same_probabilities_in_both_passes() -> None:
    """With the mask of a seed, the output is linear in the values: its gradient must give the output back."""
    given = inputs(40, 50)
    value = given["value"].clone().requires_grad_()  # type: ignore[union-attr]
    torch.manual_seed(3)
    output = relative_attention(**{**given, "value": value}, dropout=0.4, implementation="chunked")  # type: ignore[arg-type]
    weights = torch.randn_like(output)
    (output * weights).sum().backward()
    torch.testing.assert_close((value.grad * value).sum(), (output * weights).sum())
    without = relative_attention(**given, implementation="chunked")  # type: ignore[arg-type]
    assert (output - without).abs().max() > 0.05


def test_chunked_allocates_nothing_of_queries_times_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of a forward and a backward pass is as large as one map of all queries and keys."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            tensors = result if isinstance(result, (tuple, list)) else [result]
            self.numel = max([self.numel, *(t.untyped_storage().size() // 8 for t in tensors if isinstance(t, Tensor))])
            return result

    monkeypatch.setattr(chunked_module, "CHUNK", 16)
    given = inputs(512, 512)
    for window, limit in ((None, 512 * 16 * BATCH * HEADS), (32, 512 * WIDTH * BATCH * HEADS)):
        with Largest() as largest:
            run(given, "chunked", sliding_window=window)
        assert largest.numel <= limit < 512 * 512


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"query": random(2, 4, 3)}, r"query must be \[B, H, T, D\]"),
    ({"key": random(2, 1, 6, 4), "value": random(2, 1, 6, 4)}, "does not fit query"),
    ({"position_embeddings": random(5, 3, 4)}, "position_embeddings has 5 rows, but queries reach over 6 keys"),
    ({"position_bias": random(8, 4)}, r"position_bias of shape \(8, 4\) must be \[L, 3\]"),
    ({"content_bias": random(3, 5)}, r"content_bias of shape \(3, 5\) must be \[3, 4\]"),
    ({"sliding_window": 0}, "sliding_window must be at least 1"),
    (
        {"implementation": "flash"},
        r"'flash' does not exist for this family; choose from \['chunked', 'eager', 'sdpa'\]",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), MISTAKES, ids=[next(iter(wrong)) for wrong, _ in MISTAKES])
def test_bad_calls_say_what_is_wrong(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        relative_attention(**{**inputs(4, 6), **wrong})  # type: ignore[arg-type]


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
