"""A decoding step over a paged cache on a CPU, in one call of C code that reads the rows in place.

csrc/paged_decode.c describes how a row holds factors.
"""

import functools
from array import array
from ctypes import CDLL, c_float, c_long, c_void_p

import torch
from torch import Tensor

from ...distance_tables import NO_TABLES, DistanceTables
from ...native_library import C_FLOATS, load_or_warn, usable_threads
from ..composition import Composition
from ..pages import Pages
from .arguments import DecodeStep
from .composers.choice import compile_mode
from .csrc.sources import PAGED_DECODE
from .decode_native import (
    ELEMENTS_PER_THREAD,
    decode_macros,
    decodes_in_c,
    readable_tables,
    stage_members,
    table_members,
)
from .native_problem import LARGEST_STACK

# `BLOCK_KEYS` of csrc/decode.c, for whose key-side terms csrc/paged_decode.c has room on the stack.
BLOCK_KEYS = 64
# The functions of paged_decode.c, with the types of their arguments and of their result.
SIGNATURES = {
    "paged_workspace_size": ((c_void_p,), c_long),
    "attend_to_pages": ((c_void_p, c_void_p, c_void_p, c_float, c_long), None),
}


def attend_to_pages(
    query: Tensor,
    pages: Pages,
    pre: Composition | None,
    post: Composition | None,
    scaling: float,
    terms: int,
    tables: DistanceTables = NO_TABLES,
) -> Tensor | None:
    """Attention for one query of each of `N` requests. Maps and sums are float32, whatever the dtype.

    Results do not depend on the number of threads.

    Args:
        query: `[N, H, 1, D]`.
        pages: the rows of keys and values, and which of them each query sees.
        pre, post: the composition of both stages, without the key-side factors, which are in the rows.
        terms: number of key-side terms of one stage in a row, each of `H` elements; 0 if rows hold none.
        tables: a bias and a gain `[L, H]`, by distance from the query, which is at its request's last key.

    Returns:
        `[N, 1, H, D]`; None where there is no C code for these arguments.
    """
    # Rows take the place of keys `[B, H_kv, S, D]`: what is asked of them does not depend on the order of dimensions.
    step = DecodeStep(query, pages.key, pages.value, pre, post, scaling, tables=tables)
    if compile_mode() == "0" or not decodes_in_c(step):
        return None
    library = _load(query.shape[1], pages.key.shape[1], step.groups, query.shape[3], query.dtype, terms)
    if library is None:
        return None
    items, heads, _, width = query.shape
    members = [query.data_ptr(), *query.stride()[:3]]
    for rows in (pages.key, pages.value):
        members += [rows.data_ptr(), *rows.stride()[:2]]
    members += [tensor.data_ptr() for tensor in pages[2:]]
    tables = readable_tables(tables)
    members += [*stage_members(pre), *stage_members(post), items, *table_members(tables)]
    problem = array("l", members)  # the struct `paged_problem` of paged_decode.c
    address = problem.buffer_info()[0]
    output = query.new_empty(items, 1, heads, width)
    workspace = torch.empty(library.paged_workspace_size(address), **C_FLOATS)
    keys = int(pages.key_counts.sum()) * pages.key.shape[1] * width
    threads = min(usable_threads(), 1 + keys // ELEMENTS_PER_THREAD)
    library.attend_to_pages(output.data_ptr(), workspace.data_ptr(), address, scaling, threads)
    return output


@functools.cache
def _load(heads: int, kv_heads: int, groups: int, width: int, dtype: torch.dtype, terms: int) -> CDLL | None:
    """paged_decode.c for these sizes; None where it cannot be compiled, or its arrays do not fit on the stack."""
    macros = decode_macros(heads, kv_heads, groups, width, dtype)
    if macros is None or BLOCK_KEYS * terms * heads * dtype.itemsize > LARGEST_STACK:
        return None
    return load_or_warn(PAGED_DECODE, (*macros, ("TERMS", terms)), SIGNATURES)
