"""The checks that attention calls of every op and implementation have in common: values, shapes, dtypes and devices.

No contents of tensors are read, because that would wait for a device in every layer of every decoding step. Arguments
that pass are safe for code that trusts shapes, as C code does.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .autocast import is_autocast_on

LARGEST_INTEGER = torch.iinfo(torch.int64).max
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    sliding_window: int | None,
) -> None:
    """Checks the arguments that all ops have.

    Args:
        query: `[B, H, T, D]`.
        key, value: `[B, H_kv, S, D]` with `H` a multiple of `H_kv`.
        attention_mask: up to four dimensions that broadcast to `[B, H, T, S]`.

    Raises:
        ValueError: a shape, dtype, device or value does not fit; the message says what would.
    """
    if query.ndim != 4 or key.ndim != 4 or key.shape != value.shape:
        raise ValueError(
            "query must be [B, H, T, D] and key and value [B, H_kv, S, D], not "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    (batch, heads, queries, width), (key_batch, kv_heads, keys, key_width) = query.shape, key.shape
    if heads < 1 or kv_heads < 1 or width < 1:
        raise ValueError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} must have at least one head and a width of 1"
        )
    if key_batch != batch or key_width != width or heads % kv_heads:
        raise ValueError(
            f"key {tuple(key.shape)} does not fit query {tuple(query.shape)} in batch, heads or width; batch and width "
            "must be equal, and the heads of the query a multiple of those of the key"
        )
    _check_dtypes(query, key, value)
    for name, tensor in {"query": query, "key": key, "value": value}.items():
        _check_storage(name, tensor, query)
    if attention_mask is not None:
        _check_storage("attention_mask", attention_mask, query)
        _check_mask(attention_mask, (batch, heads, queries, keys))
    check_window(sliding_window)
    if scaling is not None and not (is_number(scaling) and -math.inf < scaling < math.inf):
        raise ValueError(f"scaling must be a finite number, not {scaling!r}; None takes D ** -0.5")


def check_window(sliding_window: int | None) -> None:
    """Raises ValueError unless the window is None or a positive integer that tensors can hold."""
    if sliding_window is not None and not (is_integer(sliding_window) and 1 <= sliding_window <= LARGEST_INTEGER):
        raise ValueError(
            "sliding_window must be at least 1 (the query itself) and less than 2**63, an integer, not "
            f"{sliding_window!r}; None hides no key"
        )


def check_kind(name: str, tensor: Tensor, query: Tensor, *others: torch.dtype) -> None:
    """Raises ValueError unless a dense tensor of any shape is on the device of `query` `[B, H, T, D]`, in its dtype.

    The dtype may also be one of `others`, or under autocast any floating-point dtype.
    """
    _check_storage(name, tensor, query)
    if tensor.dtype == query.dtype or tensor.dtype in others:
        return
    if not (tensor.dtype in DTYPES and is_autocast_on(query.device)):
        raise ValueError(f"{name} is {tensor.dtype}; cast it to {query.dtype}, the dtype of query")


def _check_storage(name: str, tensor: Tensor, query: Tensor) -> None:
    """Raises ValueError unless a tensor is dense, and on the device of `query`: one on `meta` would leave no result."""
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} is {tensor.layout}; attention takes dense tensors, as .to_dense() makes them")
    if tensor.device != query.device:
        raise ValueError(f"{name} is on {tensor.device}; move it to {query.device}, the device of query")


def is_integer(value: Any) -> bool:
    """Whether `value` is an integer, or stands for one while a compiler traces; a boolean is not."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether `value` is an integer or a float, or stands for one while a compiler traces."""
    return isinstance(value, (float, torch.SymFloat)) or is_integer(value)


def _check_dtypes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises ValueError unless `[B, H, T, D]` and twice `[B, H_kv, S, D]` are floating point and of one dtype.

    Under autocast dtypes other than float64 may differ, since it casts them to one.
    """
    dtypes = {tensor.dtype for tensor in (query, key, value)}
    if not dtypes <= {*DTYPES}:
        raise ValueError(f"query, key and value must be floating point, not {query.dtype}, {key.dtype}, {value.dtype}")
    are_cast = is_autocast_on(query.device) and torch.float64 not in dtypes
    if len(dtypes) > 1 and not are_cast:
        raise ValueError(
            f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}; cast them to one dtype"
        )


def check_mask_dtype(mask: Tensor) -> None:
    """Raises ValueError unless `mask` is boolean or floating point."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"attention_mask is {mask.dtype}; use a boolean one (True: visible), mask.bool(), or an additive one"
        )


def _check_mask(mask: Tensor, sizes: tuple[int, int, int, int]) -> None:
    """Raises ValueError unless `mask` is boolean or floating point, and broadcasts to `sizes` `[B, H, T, S]`."""
    check_mask_dtype(mask)
    if mask.ndim > 4 or any(
        given not in (1, size) for given, size in zip(reversed(mask.shape), reversed(sizes), strict=False)
    ):
        raise ValueError(
            f"attention_mask {tuple(mask.shape)} does not broadcast to [B, H, T, S] = {tuple(sizes)}; each of its last "
            "dimensions must be 1 or that size"
        )
