"""The checks of a call of `relative_attention` and of its implementations."""

from typing import Any

import torch
from torch import Tensor

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
    """Checks numbers, shapes and dtypes, and reads no contents; arguments are those of `relative_attention`.

    Args:
        query: `[B, H, T, D]`.
        key, value: `[B, H, S, D]`.
        position_embeddings: `[L, H, D]`.
        position_bias: `[L, H]`.
        content_bias: `[H, D]`.
        attention_mask: broadcastable to `[B, H, T, S]`.

    Raises:
        ValueError: something does not fit; the text says what was given and what would fit.
    """
    check_call(query, key, value, attention_mask, scaling, sliding_window)
    heads, width = query.shape[1], query.shape[3]
    if key.shape[1] != heads:
        raise ValueError(f"key {tuple(key.shape)} does not fit query {tuple(query.shape)} in batch, heads or width")
    check_offset(offset)
    if not (is_number(dropout) and 0 <= dropout <= 1):
        raise ValueError(f"dropout must be a probability, from 0 to 1, not {dropout!r}")
    if not (is_integer(later_rows) and later_rows >= 0):
        raise ValueError(f"later_rows must be the number of rows for later keys, at least 0, not {later_rows!r}")
    has_later_rows = is_causal or later_rows > 0
    _check_table("position_embeddings", position_embeddings, (heads, width), query, has_later_rows=has_later_rows)
    _check_table("position_bias", position_bias, (heads,), query, has_later_rows=has_later_rows)
    if attention_mask is None:
        tables = {"position_embeddings": position_embeddings, "position_bias": position_bias}
        check_table_lengths(tables, query.shape[2], key.shape[2], sliding_window, offset, later_rows, is_causal)
    if content_bias is None:
        return
    if content_bias.shape != (heads, width):
        raise ValueError(f"content_bias of shape {tuple(content_bias.shape)} must be [{heads}, {width}]")
    check_dtype("content_bias", content_bias, query)


def check_offset(offset: Any) -> None:
    """Raises ValueError unless the offset is None, an integer or an integer tensor of one element."""
    is_tensor = isinstance(offset, Tensor)
    if is_tensor and (offset.numel() != 1 or offset.is_floating_point() or offset.dtype == torch.bool):
        raise ValueError(f"offset must be one integer, not {tuple(offset.shape)} of {offset.dtype}")
    if not is_tensor and offset is not None and not is_integer(offset):
        raise ValueError(f"offset must be an integer, the position of the first query among the keys, not {offset!r}")


def check_table_lengths(
    tables: dict[str, Tensor | None],
    queries: int,
    keys: int,
    sliding_window: int | None,
    offset: int | Tensor | None,
    later_rows: int = 0,
    is_causal: bool = True,
) -> None:
    """Checks that position tables `[L, ..]` have a row for every distance that positions alone allow.

    A mask may hide the far keys, as between packed documents; layers with a mask check what their queries really
    reach. An offset that is a tensor is not read.

    Args:
        later_rows: rows of the tables that belong to later keys; the first query reaches the farthest of those.

    Raises:
        ValueError: a table is too short; the text names it.
    """
    reach = keys if offset is None or isinstance(offset, Tensor) else max(keys, queries + offset)
    rows = reach if sliding_window is None else min(reach, sliding_window)
    first = keys - queries if offset is None or isinstance(offset, Tensor) else offset
    later = 0 if is_causal else max(keys - 1 - first, 0)
    later = later if sliding_window is None else min(later, sliding_window - 1)
    for name, table in tables.items():
        if table is not None and table.ndim > 0 and (table.shape[0] - later_rows < rows or later_rows < later):
            beyond = f", and {later} keys ahead, for which it has {later_rows}" if later else ""
            raise ValueError(
                f"{name} has {table.shape[0] - later_rows} rows, but queries reach over {rows} keys{beyond}; use fewer "
                "keys, a sliding window or a longer table"
            )


def _check_table(
    name: str, table: Tensor | None, row_shape: tuple[int, ...], query: Tensor, *, has_later_rows: bool
) -> None:
    """Checks a position table `[L, *row_shape]` against the query `[B, H, T, D]`."""
    if table is None:
        return
    if table.ndim == 0 or table.shape[1:] != row_shape:
        raise ValueError(f"{name} of shape {tuple(table.shape)} must be [L, {', '.join(map(str, row_shape))}]")
    if not has_later_rows:
        raise ValueError(
            f"is_causal=False does not go with {name}: distances to later keys have no row; use is_causal=True, or a "
            "table whose first later_rows rows are theirs"
        )
    check_dtype(name, table, query)
