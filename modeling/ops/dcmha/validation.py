"""The checks of a call, both of `dcmha_attention` and of its implementations through Transformers' interface."""

import torch
from torch import Tensor

from ..distance_tables import DistanceTables, check_offset, check_table_lengths
from ..validation import check_call, check_kind, is_integer
from .composition import SIDES, Composition

# PyTorch compares unsigned integers of more than 8 bits with no others.
INDEX_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_composed_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pre: Composition | None,
    post: Composition | None,
    scaling: float | None,
    attention_mask: Tensor | None,
    sliding_window: int | None,
    first_keys: Tensor | None,
    tables: DistanceTables,
) -> None:
    """Checks values, shapes, dtypes and devices of the arguments of `dcmha_attention`, but reads no contents.

    Args:
        query: `[B, H, T, D]`.
        key, value: `[B, H_kv, S, D]`.
        attention_mask: broadcastable to `[B, H, T, S]`.
        first_keys: `[B, T]`.
        tables: a bias and a gain `[L, H]`, and the position of the first query.

    Raises:
        ValueError: something does not fit; the message says what was given and what would fit.
    """
    check_call(query, key, value, attention_mask, scaling, sliding_window)
    if first_keys is not None:
        _check_first_keys(first_keys, query)
    if pre is not None:
        _check_stage("pre", pre, query, key)
    if post is not None:
        _check_stage("post", post, query, key)
    _check_tables(tables, query, key, sliding_window)


def _check_tables(tables: DistanceTables, query: Tensor, key: Tensor, sliding_window: int | None) -> None:
    """Checks the tables of a call for a query `[B, H, T, D]` and a key `[B, H_kv, S, D]`."""
    heads, keys = query.shape[1], key.shape[2]
    check_offset(tables.offset)
    for name, table in tables.present.items():
        if table.ndim != 2 or table.shape[0] < 1 or table.shape[1] != heads:
            raise ValueError(f"{name} of shape {tuple(table.shape)} must be [L, {heads}] with at least one row")
        check_kind(name, table, query, torch.float32)
    check_table_lengths(tables.present, query.shape[2], keys, sliding_window, tables.offset)
    if tables.compose_bias and tables.bias is None:
        raise ValueError("compose_position_bias=True needs a position_bias to compose; give one, or leave it False")


def _check_first_keys(first_keys: Tensor, query: Tensor) -> None:
    """Raises ValueError unless `first_keys` are integers `[B, T]`, for a query `[B, H, T, D]`."""
    expected = (query.shape[0], query.shape[2])
    if first_keys.shape != expected or first_keys.dtype not in INDEX_DTYPES:
        raise ValueError(f"first_keys must be integers {expected}, not {first_keys.dtype} {tuple(first_keys.shape)}")


def _check_stage(stage: str, composition: Composition, query: Tensor, key: Tensor) -> None:
    """Checks the factors of a stage against the query `[B, H, T, D]` and the key `[B, H_kv, S, D]`."""
    heads = query.shape[1]
    if not is_integer(composition.groups) or composition.groups < 1 or heads % composition.groups:
        raise ValueError(
            f"{stage}.groups must be a positive integer that divides the {heads} heads, not {composition.groups!r}"
        )
    for side, tokens in zip(SIDES, (query, key), strict=True):
        _check_side(f"{stage}.{side}", *composition.side(side), (query.shape[0], tokens.shape[2], heads))
    if composition.static is not None and composition.static.shape != (heads, heads):
        _refuse(f"{stage}.static", composition.static, f"{(heads, heads)}")
    for name, factor in composition.backing_tensors().items():
        check_kind(f"{stage}.{name}", factor, query, torch.float32)


def _check_side(
    name: str, down: Tensor | None, up: Tensor | None, gate: Tensor | None, sizes: tuple[int, int, int]
) -> None:
    """Checks `down` and `up` `[B, T or S, R, H]` and `gate` `[B, T or S, H]` of one side of a stage."""
    batch, tokens, heads = sizes
    if (down is None) != (up is None):
        stage, _, side = name.partition(".")
        raise ValueError(f"{stage}: {side}_down and {side}_up come together or not at all")
    if down is not None and up is not None:
        if down.ndim != 4 or down.shape[2] < 1 or down.shape != (batch, tokens, down.shape[2], heads):
            _refuse(f"{name}_down", down, f"({batch}, {tokens}, R, {heads}) with a rank R of at least 1")
        if up.shape != down.shape:
            _refuse(f"{name}_up", up, f"{tuple(down.shape)}, the shape of {name}_down")
    if gate is not None and gate.shape != sizes:
        _refuse(f"{name}_gate", gate, f"{sizes}")


def _refuse(name: str, factor: Tensor, expected: str) -> None:
    """Raises ValueError: `factor` does not have the expected shape."""
    raise ValueError(f"{name} has shape {tuple(factor.shape)}; expected {expected}")
