"""The checks of a call of `relative_attention` and of its implementations."""

import torch
from torch import Tensor

from ..distance_tables import check_offset, check_table_lengths
from ..validation import check_call, check_dtype, is_integer, is_number


def check_relative_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    position_embeddings: Tensor | None,
    position_bias: Tensor | None,
    content_bias: Tensor | None,
    scaling: float | None,
    attention_mask: Tensor | None,
    is_causal: bool,
    sliding_window: int | None,
    offset: int | Tensor | None = None,
    dropout: float = 0.0,
    later_rows: int = 0,
) -> None:
    """Checks values, shapes and dtypes, but reads no contents of tensors; arguments are those of `relative_attention`.

    Args:
        query: `[B, H, T, D]`.
        key, value: `[B, H, S, D]`.
        position_embeddings: `[L, H, D]`.
        position_bias: `[L, H]`, also float32.
        content_bias: `[H, D]`.
        attention_mask: broadcastable to `[B, H, T, S]`.

    Raises:
        ValueError: something does not fit; the message says what was given and what would fit.
    """
    check_call(query, key, value, attention_mask, scaling, sliding_window)
    heads, width = query.shape[1], query.shape[3]
    if key.shape[1] != heads:
        raise ValueError(
            f"key {tuple(key.shape)} does not fit query {tuple(query.shape)}: relative attention has no grouped "
            f"queries, so key and value need {heads} heads; repeat theirs"
        )
    check_offset(offset)
    if not (is_number(dropout) and 0 <= dropout <= 1):
        raise ValueError(f"dropout must be a probability, from 0 to 1, not {dropout!r}")
    if not (is_integer(later_rows) and later_rows >= 0):
        raise ValueError(f"later_rows must be the number of rows for later keys, at least 0, not {later_rows!r}")
    has_later_rows = is_causal or later_rows > 0
    tables: dict[str, Tensor] = {}
    if position_embeddings is not None:
        tables["position_embeddings"] = position_embeddings
        _check_table("position_embeddings", position_embeddings, (heads, width), has_later_rows)
        check_dtype("position_embeddings", position_embeddings, query)
    if position_bias is not None:
        tables["position_bias"] = position_bias
        _check_table("position_bias", position_bias, (heads,), has_later_rows)
        check_dtype("position_bias", position_bias, query, torch.float32)
    if attention_mask is None:
        check_table_lengths(tables, query.shape[2], key.shape[2], sliding_window, offset, later_rows, is_causal)
    if content_bias is None:
        return
    if content_bias.shape != (heads, width):
        raise ValueError(f"content_bias of shape {tuple(content_bias.shape)} must be [{heads}, {width}]")
    check_dtype("content_bias", content_bias, query)


def _check_table(name: str, table: Tensor, row_shape: tuple[int, ...], has_later_rows: bool) -> None:
    """Raises ValueError unless a position table is `[L, *row_shape]` and has rows for all keys that queries see."""
    if table.ndim == 0 or table.shape[1:] != row_shape:
        raise ValueError(f"{name} of shape {tuple(table.shape)} must be [L, {', '.join(map(str, row_shape))}]")
    if not has_later_rows:
        raise ValueError(
            f"is_causal=False does not go with {name}: distances to later keys have no row; use is_causal=True, or a "
            "table whose first later_rows rows are theirs"
        )
