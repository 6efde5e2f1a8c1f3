"""A decoding step of `dcmha_chunked` on a CPU in one call of C code, which reads the cache once, as it lies there."""

import functools
from array import array
from collections.abc import Sequence
from ctypes import CDLL, c_float, c_long, c_void_p
from typing import Any

import torch
from torch import Tensor

from ...native_library import lanes, load_library
from ..composition import Composition
from .csrc.sources import DECODE

DTYPES = (torch.float32, torch.bfloat16)
FACTORS = ("query_down", "query_up", "query_gate", "key_down", "key_up", "key_gate")
TERMS = ("query_down", "query_up", "key_down", "key_up", "query_gate", "key_gate", "static")
# A further thread is worth starting for that many numbers of keys.
NUMBERS_OF_A_THREAD = 1 << 15


def serves(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: Composition | None,
    post: Composition | None,
    mask: Tensor | None,
) -> bool:
    """Whether `attend` can do this: real tensors on a CPU, all of one dtype, rows contiguous, no gradients."""
    stages = [stage for stage in (pre, post) if stage is not None]
    factors = [getattr(stage, name) for stage in stages for name in TERMS]
    tensors = [query, key, value, *(factor for factor in factors if factor is not None)]
    dtype = query.dtype
    if dtype not in DTYPES or key.numel() == 0 or query.shape[3] * dtype.itemsize < 4:  # C code reads 4 bytes at once
        return False
    if any(one.dtype != dtype or one.stride(-1) != 1 for one in tensors) or len({stage.groups for stage in stages}) > 1:
        return False
    if mask is not None:
        if mask.dtype not in (torch.bool, *DTYPES):
            return False
        tensors.append(mask)
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
        return False
    return all(type(one) is Tensor and one.is_cpu for one in tensors)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: Composition | None,
    post: Composition | None,
    scaling: float,
    mask: Tensor | None,
) -> Tensor:
    """`attend_to_cache` where `serves` says so: `[B, 1, H, D]`. Maps and sums are float32, whatever the dtype.

    Results do not depend on the number of threads.
    """
    batch, heads, _, width = query.shape
    kv_heads, keys = key.shape[1:3]
    groups = next((stage.groups for stage in (pre, post) if stage is not None), 1)
    library = _load(heads, kv_heads, groups, width, query.dtype.itemsize)
    problem = [number for tensor in (query, key, value) for number in (tensor.data_ptr(), *tensor.stride()[:3])]
    problem += (*_place_mask(mask), *_place_stage(pre), *_place_stage(post), batch, keys)
    output = query.new_empty(batch, 1, heads, width)
    room = torch.empty(library.workspace_size(batch, keys), dtype=torch.float32)
    threads = min(torch.get_num_threads(), 1 + key.numel() // NUMBERS_OF_A_THREAD)
    numbers = array("l", problem)
    library.attend(output.data_ptr(), room.data_ptr(), numbers.buffer_info()[0], scaling, threads)
    return output


def attend_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: Composition | None,
    post: Composition | None,
    scaling: float,
    mask: Tensor | None,
) -> Tensor:
    """`attend` as an operator that compilers know."""
    terms = [getattr(stage, name, None) for stage in (pre, post) for name in TERMS]
    groups = next((stage.groups for stage in (pre, post) if stage is not None), 1)
    return _attend_op(query, key, value, terms, mask, [pre is not None, post is not None], groups, scaling)


@torch.library.custom_op("dynattn::dcmha_decode", mutates_args=())
def _attend_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: Sequence[Tensor | None],
    mask: Tensor | None,
    composes: Sequence[bool],
    groups: int,
    scaling: float,
) -> Tensor:
    def stage(given: Sequence[Tensor | None]) -> Composition:
        named: dict[str, Any] = dict(zip(TERMS, given, strict=True))
        return Composition(**named, groups=groups)

    pre = stage(terms[: len(TERMS)]) if composes[0] else None
    post = stage(terms[len(TERMS) :]) if composes[1] else None
    return attend(query, key, value, pre, post, scaling, mask)


@_attend_op.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.transpose(1, 2).shape)


def _place_mask(mask: Tensor | None) -> tuple[int, ...]:
    """The members of C's `mask`; what broadcasts has no distance."""
    if mask is None:
        return (0,) * 6
    item, head, key = (0 if mask.shape[i] == 1 else mask.stride(i) for i in (0, 1, 3))
    return mask.data_ptr(), mask.dtype == torch.bool, mask.dtype.itemsize, item, head, key


def _place_stage(composition: Composition | None) -> list[int]:
    """The members of C's `stage`."""
    numbers = [int(composition is not None)]
    for name in FACTORS:
        numbers += _place_factor(getattr(composition, name, None))
    static = getattr(composition, "static", None)
    return numbers + ([0, 0] if static is None else [static.data_ptr(), static.stride(0)])


def _place_factor(factor: Tensor | None) -> tuple[int, ...]:
    """The members of C's `factor` for `[B, T or S, H]` or `[B, T or S, R, H]`."""
    if factor is None:
        return (0,) * 5
    item, key, rank, *_ = factor.stride()
    return factor.data_ptr(), item, key, rank, factor.shape[2]


@functools.cache
def _load(heads: int, kv_heads: int, groups: int, width: int, size: int) -> CDLL:
    """Compiled for the widest registers that the heads of a group fill, and those that numbers of `size` bytes do."""
    of_heads = of_width = lanes()
    while heads // groups % of_heads:
        of_heads //= 2
    while of_width * 4 > width * size:
        of_width //= 2
    macros = {"LANES": of_heads, "WIDTH_LANES": of_width, "HEADS": heads, "KV_HEADS": kv_heads, "GROUPS": groups}
    library = load_library(DECODE, tuple((macros | {"WIDTH": width, "ELEMENT_BYTES": size}).items()))
    library.workspace_size.argtypes, library.workspace_size.restype = (c_long, c_long), c_long
    library.attend.argtypes = (c_void_p, c_void_p, c_void_p, c_float, c_long)
    library.attend.restype = None
    return library
