"""The checks of a call of `relative_attention` and of its implementations."""

import torch
from torch import Tensor

from ..distance_tables import check_offset, check_table_lengths
from ..validation import check_call, check_kind, is_integer, is_number
from .eager import NO_TERMS, PositionTerms


def check_relative_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None,
    attention_mask: Tensor | None,
    is_causal: bool,
    sliding_window: int | None,
    dropout: float = 0.0,
    terms: PositionTerms = NO_TERMS,
) -> None:
    """Checks values, shapes, dtypes and devices of the arguments of `relative_attention`, but reads no contents.

    Args:
        query: `[B, H, T, D]`.
        key, value: `[B, H, S, D]`.
        attention_mask: broadcastable to `[B, H, T, S]`.
        terms: those of the scores; a bias by distance may also be float32.

    Raises:
        ValueError: something does not fit; the message says what was given and what would fit.
    """
    check_call(query, key, value, attention_mask, scaling, sliding_window)
    heads = query.shape[1]
    if key.shape[1] != heads:
        raise ValueError(
            f"key {tuple(key.shape)} does not fit query {tuple(query.shape)}: relative attention has no grouped "
            f"queries, so key and value need {heads} heads; repeat theirs"
        )
    if not (is_number(dropout) and 0 <= dropout <= 1):
        raise ValueError(f"dropout must be a probability, from 0 to 1, not {dropout!r}")
    _check_terms(terms, query, is_causal)
    if attention_mask is None:
        sizes = (query.shape[2], key.shape[2])
        check_table_lengths(terms.tables, *sizes, sliding_window, terms.offset, terms.later_rows, is_causal)


def _check_terms(terms: PositionTerms, query: Tensor, is_causal: bool) -> None:
    """Raises ValueError unless each term fits queries `[B, H, T, D]`; the lengths of tables are not checked."""
    check_offset(terms.offset)
    (_, heads, _, width), later_rows, content_bias = query.shape, terms.later_rows, terms.content_bias
    if not (is_integer(later_rows) and later_rows >= 0):
        raise ValueError(f"later_rows must be the number of rows for later keys, at least 0, not {later_rows!r}")
    has_later_rows = is_causal or later_rows > 0
    if terms.embeddings is not None:
        _check_table("position_embeddings", terms.embeddings, (heads, width), has_later_rows)
        check_kind("position_embeddings", terms.embeddings, query)
    if terms.bias is not None:
        _check_table("position_bias", terms.bias, (heads,), has_later_rows)
        check_kind("position_bias", terms.bias, query, torch.float32)
    if content_bias is not None:
        if content_bias.shape != (heads, width):
            raise ValueError(f"content_bias of shape {tuple(content_bias.shape)} must be [{heads}, {width}]")
        check_kind("content_bias", content_bias, query)


def _check_table(name: str, table: Tensor, row_shape: tuple[int, ...], has_later_rows: bool) -> None:
    """Raises ValueError unless a position table is `[L, *row_shape]` and has rows for all keys that queries see."""
    if table.ndim == 0 or table.shape[1:] != row_shape:
        raise ValueError(f"{name} of shape {tuple(table.shape)} must be [L, {', '.join(map(str, row_shape))}]")
    if not has_later_rows:
        raise ValueError(
            f"is_causal=False does not go with {name}: distances to later keys have no row; use is_causal=True, or a "
            "table whose first later_rows rows are theirs"
        )
