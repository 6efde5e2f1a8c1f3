"""A decoding step of `dcmha_chunked` on a CPU in one call of C code, which reads the cache once and in place."""

import functools
from array import array
from collections.abc import Sequence
from ctypes import CDLL, c_float, c_long, c_void_p

import torch
from torch import Tensor
from torch.nn import Parameter

from ...c_compiler import lanes
from ...distance_tables import DistanceTables
from ...native_library import C_FLOATS, load_or_warn, usable_threads
from ..composition import Composition, list_tensors
from .arguments import DecodeStep
from .csrc.sources import DECODE
from .native_problem import LARGEST_STACK, TYPES

DTYPES = tuple(TYPES)
# One more thread is worth starting for this many elements of keys.
ELEMENTS_PER_THREAD = 1 << 15
# The most elements of a query `[H, D]`, which C code keeps on the stack of a thread in float32.
LARGEST_QUERY = 1 << 17
# `BLOCK_KEYS` of csrc/decode.c, which keeps the terms of so many rows of pages on the stack.
BLOCK_KEYS = 64
# The functions of decode.c, with the types of their arguments and of their result.
SIGNATURES = {
    "workspace_size": ((c_void_p,), c_long),
    "attend": ((c_void_p, c_void_p, c_void_p, c_float, c_long), None),
}


def decodes_in_c(step: DecodeStep) -> bool:
    """Whether `decode_in_c` takes this step.

    It takes plain tensors and parameters on a CPU in one of `DTYPES`; the mask may be boolean. All but mask and tables
    must have the same dtype and a contiguous last dimension. None may be a view that negates what is in memory, such as
    the imaginary part of a conjugate. No gradient may be needed, and both stages must have the same head groups.
    """
    query, key, value, pre, post, _, mask, tables = step
    stages = [stage for stage in (pre, post) if stage is not None]
    tensors = [query, key, value]
    for stage in stages:
        tensors += stage.backing_tensors().values()
    dtype = query.dtype
    if dtype not in DTYPES or key.numel() == 0 or query.shape[3] * dtype.itemsize < 4:  # C code reads 4 bytes at once
        return False
    if any(one.dtype != dtype or one.stride(-1) != 1 for one in tensors) or len({stage.groups for stage in stages}) > 1:
        return False
    others = [one for one in (mask, tables.bias, tables.gain) if one is not None]
    if any(one.dtype not in (torch.bool, *DTYPES) for one in others):
        return False
    tensors += others
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
        return False
    if not all(type(one) in (Tensor, Parameter) and one.is_cpu for one in tensors):
        return False
    # A compiler cannot trace `is_neg`, and calls C code by an operator, for which PyTorch makes copies of such views.
    return torch.compiler.is_compiling() or not any(one.is_neg() for one in tensors)


def decode_in_c(step: DecodeStep) -> Tensor | None:
    """Attention `[B, 1, H, D]` of a step that `decodes_in_c` accepts; None where there is no C code for its sizes.

    Maps and sums are float32, whatever the dtype. Results do not depend on the number of threads.
    """
    library = load_decode(step, terms=0)
    if library is None:
        return None
    mask = _without_float16(step.mask)
    keys, offset = step.key.shape[2], step.tables.offset
    source = [member for tensor in (step.key, step.value) for member in (tensor.data_ptr(), *tensor.stride()[:3])]
    source += (*_mask_members(mask), keys, keys - 1 if offset is None else int(offset))
    source += (0, 0, 0)  # there are no rows of pages
    return call_decode(library, step, source, step.key.numel())


def load_decode(step: DecodeStep, terms: int) -> CDLL | None:
    """decode.c for the sizes of a step, with `terms` terms in each row of its pages, or 0 if its keys are in no pages.

    Returns:
        The library; None where it cannot be compiled, or a query or the terms do not fit on the stack.
    """
    _, heads, _, width = step.query.shape
    return _load(heads, step.key.shape[1], step.groups, width, step.query.dtype, terms)


def call_decode(library: CDLL, step: DecodeStep, source: Sequence[int], elements: int) -> Tensor:
    """Calls `attend` of decode.c; returns `[B, 1, H, D]`.

    Args:
        source: the last members of the C struct `decode_problem`, from `key` on: where keys and values are, and which
            of them a query sees. Tensors in whose memory they are have to live until this returns.
        elements: how many elements the keys have together.
    """
    batch, heads, _, width = step.query.shape
    tables = _readable_tables(step.tables)
    members = [step.query.data_ptr(), *step.query.stride()[:3], *_stage_members(step.pre), *_stage_members(step.post)]
    problem = array("l", [*members, *_table_members(tables), batch, *source])
    address = problem.buffer_info()[0]
    output = step.query.new_empty(batch, 1, heads, width)
    workspace = torch.empty(library.workspace_size(address), **C_FLOATS)
    threads = min(usable_threads(), 1 + elements // ELEMENTS_PER_THREAD)
    library.attend(output.data_ptr(), workspace.data_ptr(), address, step.scaling, threads)
    return output


def _without_float16(mask: Tensor | None) -> Tensor | None:
    """A mask as C code reads it: float16 as float32, because C code takes 2-byte elements for bfloat16.

    The lowest finite float16 hides a key, so it becomes minus infinity.
    """
    if mask is None or mask.dtype != torch.float16:
        return mask
    lowest = mask == torch.finfo(mask.dtype).min
    return mask.float().masked_fill_(lowest, -torch.inf)


def _mask_members(mask: Tensor | None) -> tuple[int, ...]:
    """The members of the C struct `decode_mask`, for one that broadcasts to `[B, H, 1, S]`."""
    if mask is None:
        return (0,) * 6
    item, head, key = (0 if mask.shape[i] == 1 else mask.stride(i) for i in (0, 1, 3))
    return mask.data_ptr(), mask.dtype == torch.bool, mask.dtype.itemsize, item, head, key


def _readable_tables(tables: DistanceTables) -> DistanceTables:
    """Tables as C code reads them: contiguous and in float32."""
    bias, gain = (None if table is None else table.float().contiguous() for table in (tables.bias, tables.gain))
    return tables._replace(bias=bias, gain=gain)


def _table_members(tables: DistanceTables) -> list[int]:
    """The members of the C struct `tables`, for `_readable_tables`."""
    members = []
    for table in (tables.bias, tables.gain):
        members += [0, 0] if table is None else [table.data_ptr(), len(table)]
    return [*members, int(tables.compose_bias)]


def _stage_members(composition: Composition | None) -> list[int]:
    """The members of the C struct `decode_stage`."""
    *factors, static = list_tensors(composition)
    members = [int(composition is not None)]
    for factor in factors:
        members += _factor_members(factor)
    return members + ([0, 0] if static is None else [static.data_ptr(), static.stride(0)])


def _factor_members(factor: Tensor | None) -> tuple[int, ...]:
    """The members of the C struct `factor`, for `[B, T or S, H]` or `[B, T or S, R, H]`."""
    if factor is None:
        return (0,) * 5
    item, key, term, *_ = factor.stride()
    return factor.data_ptr(), item, key, term, factor.shape[2]


@functools.cache
def _load(heads: int, kv_heads: int, groups: int, width: int, dtype: torch.dtype, terms: int) -> CDLL | None:
    """decode.c for these sizes, with the widest registers that the heads of a group, and the elements of a head, fill.

    Returns:
        The library, or None in the cases that `load_decode` names.
    """
    if heads * width > LARGEST_QUERY or BLOCK_KEYS * terms * heads * dtype.itemsize > LARGEST_STACK:
        return None
    head_lanes = width_lanes = lanes()
    while heads // groups % head_lanes:
        head_lanes //= 2
    while width_lanes * 4 > width * dtype.itemsize:
        width_lanes //= 2
    macros = {"LANES": head_lanes, "WIDTH_LANES": width_lanes, "HEADS": heads, "KV_HEADS": kv_heads, "GROUPS": groups}
    macros |= {"WIDTH": width, "ELEMENT_BYTES": dtype.itemsize, "IS_FLOAT16": int(dtype == torch.float16)}
    return load_or_warn(DECODE, (*macros.items(), ("TERMS", terms)), SIGNATURES)
