"""How `dcmha_chunked` works on a chunk of float32 maps on a CPU: in place, in C code compiled for the composition."""

import functools
import warnings
from collections.abc import Callable
from ctypes import c_long, c_void_p
from typing import Any

import torch
from torch import Tensor

from .dcmha_chunked_core import Composer, Sight, Stage
from .dcmha_chunked_source import SOURCE
from .native_library import lanes, load_library


@functools.cache
def available() -> bool:
    """Whether C code can be compiled and loaded here; warns once where it cannot."""
    try:
        _function("softmax", heads=1, stage=None)
    except OSError as error:
        warnings.warn(f"attention on this CPU is several times slower than it could be: {error}", stacklevel=2)
        return False
    return True


def compose(out: Tensor, maps: Tensor, stage: Stage, scratch: Tensor) -> None:
    """Writes the composition of `maps` `[c, H, n]` to `out`, which may be `maps`."""
    base = _mix_static(maps, stage.static, scratch)
    call = _function("compose", maps.shape[1], stage)
    call(*map(_pointer, (out, maps, base, stage.query, stage.key)), *_sizes(maps, stage), torch.get_num_threads())


def compose_backward(out: Tensor, gradient: Tensor, maps: Tensor, stage: Stage, sums: Stage, scratch: Tensor) -> None:
    """Turns `out`, which is `gradient`, into the gradient of `maps`; adds those of the factors to `sums`."""
    if sums.static is not None:
        sums.static.add_(torch.tensordot(maps, gradient, dims=([0, 2], [0, 2])))
    base = _mix_static(gradient, None if stage.static is None else stage.static.t(), scratch)
    call = _function("differentiate", maps.shape[1], stage)
    shape = (0,) if stage.query is None else stage.query.shape
    for_query = maps.new_zeros(torch.get_num_threads(), *shape, lanes())
    tensors = (out, maps, base, stage.query, stage.key, for_query, sums.key)
    call(*map(_pointer, tensors), *_sizes(maps, stage), len(for_query))
    if sums.query is not None:
        sums.query.add_(for_query.sum((0, -1)))


def softmax(out: Tensor, scores: Tensor, sight: Sight) -> None:
    """Turns `out`, which is `scores`, into the probabilities."""
    sight.hide_by_mask(scores)
    call = _function("softmax", heads=1, stage=None)
    call(*map(_pointer, (scores, sight.first_keys)), *_sizes(scores), *_span(sight), *_shares(scores))


def softmax_backward(out: Tensor, gradient: Tensor, probs: Tensor, sight: Sight) -> None:
    """Turns `out`, which is `gradient`, into the gradient of the scores."""
    call = _function("softmax_backward", heads=1, stage=None)
    call(*map(_pointer, (gradient, probs, sight.first_keys)), *_sizes(probs), *_span(sight), *_shares(probs))


NATIVE = Composer(compose, compose_backward, softmax, softmax_backward, in_place=True)


def _mix_static(maps: Tensor, static: Tensor | None, scratch: Tensor) -> Tensor:
    """The maps themselves plus what a static matrix, indexed [in, out], makes of them."""
    if static is None:
        return maps
    heads_first, out = maps.transpose(0, 1), scratch.transpose(0, 1)  # [H, c, n]
    torch.add(heads_first, torch.tensordot(static, heads_first, dims=([0], [0])), out=out)
    return scratch


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _sizes(maps: Tensor, stage: Stage | None = None) -> tuple[int, ...]:
    """How far apart the factors of keys lie, if there is a stage, and heads; the numbers of queries and keys."""
    rows = () if stage is None else (0 if stage.key is None else stage.key.stride(1),)
    return *rows, maps.stride(1), maps.shape[0], maps.shape[2]


def _span(sight: Sight) -> tuple[int, int, int]:
    """On which of the chunk's keys its first query stands, and how many keys before and after its own a query sees."""
    structure, all_keys = sight.structure, sight.structure.keys
    distance = sight.queries.start + all_keys - structure.queries - sight.keys.start
    side = all_keys if structure.sliding_window is None else structure.sliding_window - 1
    return distance, side, 0 if structure.is_causal else side


def _shares(maps: Tensor) -> tuple[int, int]:
    """The heads, and how many threads share all rows."""
    return maps.shape[1], torch.get_num_threads()


@functools.cache
def _load(heads: int, groups: int, query_rows: int, key_rows: int) -> Any:
    macros = {"LANES": lanes(), "HEADS": heads, "GROUPS": groups}
    macros |= {"QUERY_RANK": query_rows // 2, "QUERY_GATE": query_rows % 2}
    macros |= {"KEY_RANK": key_rows // 2, "KEY_GATE": key_rows % 2}
    library = load_library(SOURCE, tuple(macros.items()))
    for name, pointers, sizes in (
        ("compose", 5, 5),
        ("differentiate", 7, 5),
        ("softmax", 2, 8),
        ("softmax_backward", 3, 8),
    ):
        function = getattr(library, name)
        function.argtypes, function.restype = (c_void_p,) * pointers + (c_long,) * sizes, None
    return library


def _function(name: str, heads: int, stage: Stage | None) -> Callable[..., None]:
    """One of the C functions, compiled for a stage."""
    if stage is None:
        return getattr(_load(heads, 1, 0, 0), name)
    rows = [0 if side is None else side.shape[axis] for side, axis in ((stage.query, 1), (stage.key, 0))]
    return getattr(_load(heads, stage.groups, *rows), name)
