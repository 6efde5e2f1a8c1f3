"""The composer for float32 on a CPU: in place, in C code that is compiled for the composition's ranks and heads."""

import functools
from collections.abc import Callable
from ctypes import c_long, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....native_library import lanes, load_or_warn
from ..csrc.sources import COMPOSE
from .interface import ChunkComposer, ChunkVisibility, StageFactors

# Each function of compose.c: the number of its pointers, and of the integers that follow them.
SIGNATURES = {"compose": (5, 8), "differentiate": (8, 8), "softmax": (2, 9), "softmax_backward": (3, 9)}
# The most bytes that a function of compose.c may put on the stack of a thread; stages that need more do without C code.
LARGEST_STACK = 1 << 20
# `BLOCK_KEYS` and the larger `BLOCK_QUERIES` of compose.c.
BLOCK_KEYS, BLOCK_QUERIES = 64, 4


class StageShape(NamedTuple):
    """What compose.c is compiled for."""

    heads: int  # H
    groups: int
    query_terms: int
    key_terms: int

    @property
    def stack(self) -> int:
        """How many bytes `differentiate` puts on the stack: two tiles of key terms, and two sets of hidden maps."""
        tiles = 2 * self.key_terms * self.heads * BLOCK_KEYS
        hidden = (self.query_terms + self.key_terms) * BLOCK_QUERIES * BLOCK_KEYS
        return torch.float32.itemsize * (tiles + hidden)


# Softmax is in every library, and takes that of no terms.
SOFTMAX = StageShape(1, 1, 0, 0)


def available(*shapes: StageShape) -> bool:
    """Whether there is C code for softmax and for stages of these shapes; the first time this compiles it."""
    return all(_load(shape) is not None for shape in (SOFTMAX, *shapes))


def compose(out: Tensor, maps: Tensor, factors: StageFactors, scratch: Tensor) -> None:
    """Writes the composition of `maps` `[c, bH, n]` to `out`, which may be `maps`."""
    base = _mix_static(maps, factors.static, scratch)
    tensors = (out, maps, base, factors.query, factors.key)
    function = _function_for("compose", factors)
    function(*map(_pointer, tensors), *_factor_strides(factors), *_map_sizes(maps, factors.heads))


def compose_backward(
    out: Tensor, gradient: Tensor, maps: Tensor, factors: StageFactors, sums: StageFactors, scratch: Tensor
) -> None:
    """Turns `out`, which is `gradient`, into the gradient of `maps`; all are `[c, bH, n]`.

    Adds the gradients of the factors to `sums`.
    """
    if sums.static is not None:
        inputs, grads = (_join_queries(tensor, factors.heads) for tensor in (maps, gradient))
        sums.static.add_(torch.bmm(inputs, grads.transpose(1, 2)).sum(0))
    base = _mix_static(gradient, None if factors.static is None else factors.static.t(), scratch)
    shape = (0,) if factors.query is None else factors.query.shape
    partial_sums = maps.new_empty(torch.get_num_threads(), *shape, lanes())
    tensors = (out, maps, base, factors.query, factors.key, partial_sums, sums.query, sums.key)
    function = _function_for("differentiate", factors)
    function(*map(_pointer, tensors), *_factor_strides(factors), *_map_sizes(maps, factors.heads))


def softmax(out: Tensor, scores: Tensor, visibility: ChunkVisibility) -> None:
    """Turns `out`, which is `scores` `[c, bH, n]`, into the probabilities."""
    visibility.hide_by_mask(scores)
    heads = scores.shape[1] // visibility.items
    tensors = (scores, visibility.first_keys)
    _load(SOFTMAX).softmax(*map(_pointer, tensors), *_band(visibility), heads, *_map_sizes(scores, heads))


def softmax_backward(out: Tensor, gradient: Tensor, probs: Tensor, visibility: ChunkVisibility) -> None:
    """Turns `out`, which is `gradient` `[c, bH, n]`, into the gradient of the scores."""
    heads = probs.shape[1] // visibility.items
    tensors = (gradient, probs, visibility.first_keys)
    _load(SOFTMAX).softmax_backward(*map(_pointer, tensors), *_band(visibility), heads, *_map_sizes(probs, heads))


NATIVE = ChunkComposer(compose, compose_backward, softmax, softmax_backward, in_place=True)


def _mix_static(maps: Tensor, static: Tensor | None, scratch: Tensor) -> Tensor:
    """`maps` `[c, bH, n]` plus their product with `static` `[H, H]`, indexed [in, out]; uses `scratch` `[c, bH, n]`."""
    if static is None:
        return maps
    inputs, out = (_join_queries(tensor, len(static)) for tensor in (maps, scratch))
    torch.baddbmm(inputs, static.t().expand(len(inputs), -1, -1), inputs, out=out)
    return scratch


def _join_queries(maps: Tensor, heads: int) -> Tensor:
    """`[c, bH, n]` to `[b, H, cn]`, a view."""
    return maps.transpose(0, 1).flatten(1).unflatten(0, (-1, heads))


def _pointer(tensor: Tensor | None) -> int | None:
    """The address of the data, for a tensor of any shape."""
    return None if tensor is None else tensor.data_ptr()


def _factor_strides(factors: StageFactors) -> tuple[int, int, int]:
    """Strides in elements: query factors per item, key factors per item, key factors per head."""
    query = 0 if factors.query is None else factors.query.stride(0)
    return (query, 0, 0) if factors.key is None else (query, factors.key.stride(0), factors.key.stride(2))


def _map_sizes(maps: Tensor, heads: int) -> tuple[int, ...]:
    """For maps `[c, bH, n]`: the stride of heads in elements, `b`, `c`, `n`, and the number of threads."""
    return maps.stride(1), maps.shape[1] // heads, maps.shape[0], maps.shape[2], torch.get_num_threads()


def _band(visibility: ChunkVisibility) -> tuple[int, int, int]:
    """The index among the chunk's keys of its first query's own key; how many keys behind and ahead a query sees."""
    structure = visibility.structure
    offset = visibility.queries.start + structure.keys - structure.queries - visibility.keys.start
    unbounded = structure.queries + structure.keys  # the first of many queries stands far before the last key
    side = unbounded if structure.sliding_window is None else structure.sliding_window - 1
    return offset, side, 0 if structure.is_causal else side


@functools.cache
def _load(shape: StageShape) -> Any:
    """compose.c, compiled for a stage; None where it cannot be compiled, or does not fit on the stack."""
    if shape.stack > LARGEST_STACK:
        return None
    macros = {"LANES": lanes(), "HEADS": shape.heads, "GROUPS": shape.groups}
    macros |= {"QUERY_RANK": shape.query_terms // 2, "QUERY_GATE": shape.query_terms % 2}
    macros |= {"KEY_RANK": shape.key_terms // 2, "KEY_GATE": shape.key_terms % 2}
    library = load_or_warn(COMPOSE, tuple(macros.items()), tuple(SIGNATURES))
    if library is None:
        return None
    for name, (pointers, integers) in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = (c_void_p,) * pointers + (c_long,) * integers, None
    return library


def _function_for(name: str, factors: StageFactors) -> Callable[..., None]:
    """The function `name` of compose.c, compiled for these factors."""
    terms = [0 if side is None else side.shape[dim] for side, dim in ((factors.query, 2), (factors.key, 1))]
    return getattr(_load(StageShape(factors.heads, factors.groups, *terms)), name)
