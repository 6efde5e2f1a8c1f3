"""How `dcmha_chunked` works on a chunk of float32 maps on a CPU: in place, in C code compiled for the composition."""

import functools
import warnings
from collections.abc import Callable
from ctypes import c_long, c_void_p
from typing import Any

import torch
from torch import Tensor

from ....native_library import lanes, load_library
from ..csrc.sources import COMPOSE
from .interface import Composer, Sight, Stage


@functools.cache
def available() -> bool:
    """Whether C code can be compiled and loaded here; warns once where it cannot."""
    try:
        _load(1, 1, 0, 0)
    except OSError as error:
        warnings.warn(f"attention on this CPU is several times slower than it could be: {error}", stacklevel=2)
        return False
    return True


def compose(out: Tensor, maps: Tensor, stage: Stage, scratch: Tensor) -> None:
    """Writes the composition of `maps` `[c, bH, n]` to `out`, which may be `maps`."""
    base = _mix_static(maps, stage.static, scratch)
    tensors = (out, maps, base, stage.query, stage.key)
    _stage_function("compose", stage)(*map(_pointer, tensors), *_strides(stage), *_sizes(maps, stage.heads))


def compose_backward(out: Tensor, gradient: Tensor, maps: Tensor, stage: Stage, sums: Stage, scratch: Tensor) -> None:
    """Turns `out`, which is `gradient`, into the gradient of `maps`; adds those of the factors to `sums`."""
    if sums.static is not None:
        before, after = (_flat(tensor, stage.heads) for tensor in (maps, gradient))
        sums.static.add_(torch.bmm(before, after.transpose(1, 2)).sum(0))
    base = _mix_static(gradient, None if stage.static is None else stage.static.t(), scratch)
    shape = (0,) if stage.query is None else stage.query.shape
    parts = maps.new_empty(torch.get_num_threads(), *shape, lanes())
    tensors = (out, maps, base, stage.query, stage.key, parts, sums.query, sums.key)
    _stage_function("differentiate", stage)(*map(_pointer, tensors), *_strides(stage), *_sizes(maps, stage.heads))


def softmax(out: Tensor, scores: Tensor, sight: Sight) -> None:
    """Turns `out`, which is `scores`, into the probabilities."""
    sight.hide_by_mask(scores)
    heads = scores.shape[1] // sight.items
    _load(1, 1, 0, 0).softmax(*map(_pointer, (scores, sight.first_keys)), *_span(sight), heads, *_sizes(scores, heads))


def softmax_backward(out: Tensor, gradient: Tensor, probs: Tensor, sight: Sight) -> None:
    """Turns `out`, which is `gradient`, into the gradient of the scores."""
    heads = probs.shape[1] // sight.items
    _load(1, 1, 0, 0).softmax_backward(
        *map(_pointer, (gradient, probs, sight.first_keys)), *_span(sight), heads, *_sizes(probs, heads)
    )


NATIVE = Composer(compose, compose_backward, softmax, softmax_backward, in_place=True)


def _mix_static(maps: Tensor, static: Tensor | None, scratch: Tensor) -> Tensor:
    """The maps themselves plus what a static matrix, indexed [in, out], makes of them."""
    if static is None:
        return maps
    before, out = (_flat(tensor, len(static)) for tensor in (maps, scratch))
    torch.baddbmm(before, static.t().expand(len(before), -1, -1), before, out=out)
    return scratch


def _flat(maps: Tensor, heads: int) -> Tensor:
    """`[c, bH, n]` to `[b, H, cn]`, a view."""
    return maps.transpose(0, 1).flatten(1).unflatten(0, (-1, heads))


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _strides(stage: Stage) -> tuple[int, int, int]:
    """How far apart the factors of items lie, those of queries and those of keys; and rows and heads of the latter."""
    query = 0 if stage.query is None else stage.query.stride(0)
    return (query, 0, 0) if stage.key is None else (query, stage.key.stride(0), stage.key.stride(2))


def _sizes(maps: Tensor, heads: int) -> tuple[int, ...]:
    """How far apart heads of maps lie; the numbers of items, queries, keys and threads."""
    return maps.stride(1), maps.shape[1] // heads, maps.shape[0], maps.shape[2], torch.get_num_threads()


def _span(sight: Sight) -> tuple[int, int, int]:
    """On which of the chunk's keys its first query stands, and how many keys before and after its own a query sees."""
    structure, all_keys = sight.structure, sight.structure.keys
    distance = sight.queries.start + all_keys - structure.queries - sight.keys.start
    side = all_keys if structure.sliding_window is None else structure.sliding_window - 1
    return distance, side, 0 if structure.is_causal else side


@functools.cache
def _load(heads: int, groups: int, query_rows: int, key_rows: int) -> Any:
    macros = {"LANES": lanes(), "HEADS": heads, "GROUPS": groups}
    macros |= {"QUERY_RANK": query_rows // 2, "QUERY_GATE": query_rows % 2}
    macros |= {"KEY_RANK": key_rows // 2, "KEY_GATE": key_rows % 2}
    library = load_library(COMPOSE, tuple(macros.items()))
    for name, pointers, sizes in (
        ("compose", 5, 8),
        ("differentiate", 8, 8),
        ("softmax", 2, 9),
        ("softmax_backward", 3, 9),
    ):
        function = getattr(library, name)
        function.argtypes, function.restype = (c_void_p,) * pointers + (c_long,) * sizes, None
    return library


def _stage_function(name: str, stage: Stage) -> Callable[..., None]:
    """One of the C functions that are compiled for a stage."""
    rows = [0 if side is None else side.shape[axis] for side, axis in ((stage.query, 2), (stage.key, 1))]
    return getattr(_load(stage.heads, stage.groups, *rows), name)
