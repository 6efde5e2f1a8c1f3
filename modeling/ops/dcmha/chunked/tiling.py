"""How the work of the chunked op is divided: into spans of items, and for each span into chunks of queries.

An item is a row of the batch. `b` items share a chunk, which has `c` queries and the `n` keys that any of them sees.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...masking import Structure
from .arguments import ChunkedInputs, ChunkedSettings
from .chunk import ScoreTransform
from .composers.choice import choose_composer
from .composers.interface import ChunkComposer, ChunkVisibility, StageFactors
from .composers.native import StageShape
from .composers.stepwise import STEPWISE

# Queries of a chunk: the first of these numbers that keeps one map within `LARGEST_MAP` elements, or the last one. More
# queries make the matrix products faster, fewer keep maps in the processor's cache.
CHUNK_QUERIES = (64, 32, 16)
LARGEST_MAP = 1 << 25
# The same for maps that are worked on in place, in the cache. Odd multiples of 4 queries and of `KEY_MULTIPLE` keys put
# the rows of different heads into different sets of that cache.
CHUNK_QUERIES_IN_PLACE = (60, 28, 12)
LARGEST_MAP_IN_PLACE = 1 << 23
KEY_MULTIPLE = 16
# Items share a chunk while its maps, which are worked on in place, stay within this many elements.
LARGEST_SHARED_MAP = 1 << 20
# Keys that `_copy_keys_last` transposes at a time.
TRANSPOSED_KEYS = 64

# The memory that each buffer of a chunk uses, (not in place, in place): equal numbers share it. The last is scratch.
FORWARD_BUFFERS = ([0, 1, 2], [0, 0, 1])
BACKWARD_BUFFERS = ([0, 1, 2, 3, 4], [0, 1, 1, 2, 3])


class Items(NamedTuple):
    """Some items of the batch in the working dtype. Items and heads are one dimension, for batched products."""

    num_items: int  # b
    query: Tensor  # [bH, T, D]
    key: Tensor  # [bH_kv, S, D]
    value: Tensor  # [bH_kv, S, D]
    pre: StageFactors | None
    post: StageFactors | None
    mask: Tensor | None  # [b or 1, H or 1, T or 1, S or 1]
    first_keys: Tensor | None  # [b, T], int64, contiguous as C code reads them


class QueryChunk(NamedTuple):
    """Some queries, the keys that any of them sees, buffers for maps over both, and the composer of these maps."""

    visibility: ChunkVisibility
    buffers: list[Tensor]  # [c, bH, n] each
    composer: ChunkComposer

    def part_of(self, factors: StageFactors | None) -> StageFactors | None:
        """Views of `factors`, or of their gradients, for the chunk's queries and keys."""
        if factors is None:
            return None
        query = None if factors.query is None else factors.query[:, self.visibility.queries]
        key = None if factors.key is None else factors.key[..., self.visibility.keys]
        return StageFactors(query, key, factors.static, factors.groups)

    def transform(self, items: Items) -> ScoreTransform:
        """What happens to the chunk's scores."""
        return ScoreTransform(self._factors(items.pre), self._factors(items.post), self.visibility, self.composer)

    def _factors(self, factors: StageFactors | None) -> StageFactors | None:
        part = self.part_of(factors)
        if part is None or part.key is None or self.composer.in_place:
            return part
        return part._replace(key=part.key.contiguous())


def structure_of(inputs: ChunkedInputs, settings: ChunkedSettings) -> Structure:
    """Which keys each query may see by position alone."""
    queries, keys = inputs.query.shape[2], inputs.key.shape[2]
    return Structure(queries, keys, settings.is_causal, settings.sliding_window)


def composer_for(
    inputs: ChunkedInputs, settings: ChunkedSettings, structure: Structure, dtype: torch.dtype
) -> ChunkComposer:
    """The composer for a call, chosen by its device, dtype, terms and number of (head, query, key) triples."""
    queries = structure.queries
    keys = _length(structure.reach(slice(0, queries)))
    batch, heads = inputs.query.shape[:2]
    stages = (
        (settings.pre_groups, inputs.pre_query, inputs.pre_key, inputs.pre_static),
        (settings.post_groups, inputs.post_query, inputs.post_key, inputs.post_static),
    )
    shapes = [
        StageShape(heads, groups, _count_terms(query), _count_terms(key))
        for groups, query, key, static in stages
        if not (query is key is static is None)
    ]
    return choose_composer(inputs.query.device, dtype, batch * heads * queries * keys // 2, *shapes)


def _count_terms(terms: Tensor | None) -> int:
    """The number of terms of `[B, T or S, terms, H]`."""
    return 0 if terms is None else terms.shape[2]


def item_spans(inputs: ChunkedInputs, structure: Structure, composer: ChunkComposer) -> list[slice]:
    """Which items are worked on together: several where maps are small, because that makes the products larger."""
    batch, heads = inputs.query.shape[:2]
    queries = min(_chunk_queries(structure, heads, composer), structure.queries)
    keys = _length(structure.reach(slice(structure.queries - queries, structure.queries)))
    most = LARGEST_SHARED_MAP // max(1, queries * heads * keys) if composer.in_place else 1
    count = -(-batch // max(1, min(most, batch)))  # of spans, which share the items evenly
    return [slice(index * batch // count, (index + 1) * batch // count) for index in range(count)]


def read_items(inputs: ChunkedInputs, settings: ChunkedSettings, span: slice, dtype: torch.dtype) -> Items:
    """The inputs of the items `span`, in `dtype` and in the layout that chunks read."""
    return Items(
        span.stop - span.start,
        inputs.query[span].to(dtype).flatten(0, 1),
        inputs.key[span].to(dtype).flatten(0, 1),
        inputs.value[span].to(dtype).flatten(0, 1),
        _read_factors(inputs.pre_query, inputs.pre_key, inputs.pre_static, settings.pre_groups, span, dtype),
        _read_factors(inputs.post_query, inputs.post_key, inputs.post_static, settings.post_groups, span, dtype),
        None if inputs.mask is None else mask_of_items(inputs.mask, span),
        None if inputs.first_keys is None else _read_first_keys(inputs.first_keys[span], inputs.query.device),
    )


def _read_first_keys(first_keys: Tensor, device: torch.device) -> Tensor:
    """`[b, T]` of any integers and strides, as `Items` has them."""
    return first_keys.to(device, torch.int64).contiguous()


def _read_factors(
    query: Tensor | None, key: Tensor | None, static: Tensor | None, groups: int, span: slice, dtype: torch.dtype
) -> StageFactors | None:
    """The items `span` of `[B, T, terms, H]`, `[B, S, terms, H]` and `[H, H]`; None if all three are None."""
    if query is None and key is None and static is None:
        return None
    return StageFactors(
        None if query is None else query[span].to(dtype).contiguous(),
        None if key is None else _copy_keys_last(key[span].to(dtype).permute(0, 2, 3, 1)),
        None if static is None else static.to(dtype),
        groups,
    )


def transpose_rows(rows: Tensor) -> Tensor:
    """`[bH_kv, S, D]` to contiguous `[bH_kv, D, S]`, which products with queries read faster."""
    return _copy_keys_last(rows.transpose(1, 2))


def _copy_keys_last(view: Tensor) -> Tensor:
    """A contiguous copy of a view `[..., S]` in which neighbouring keys lie far apart.

    On a CPU a few keys are copied at a time, because a copy of all at once would miss the caches.
    """
    if view.device.type != "cpu":
        return view.contiguous()
    copy = torch.empty_like(view, memory_format=torch.contiguous_format)
    for target, source in zip(copy.split(TRANSPOSED_KEYS, -1), view.split(TRANSPOSED_KEYS, -1), strict=True):
        target.copy_(source)
    return copy


def query_chunks(
    structure: Structure, items: Items, composer: ChunkComposer, buffers: tuple[list[int], list[int]]
) -> Iterator[QueryChunk]:
    """Chunks of the queries that see any key; their buffers share memory.

    Compiled code is made for one number of queries, so that a last chunk of another size is composed step by step,
    except in place.
    """
    heads = items.query.shape[0]  # bH
    most = _chunk_queries(structure, heads // items.num_items, composer)
    starts = range(0, structure.queries, most)
    query_spans = [slice(start, min(start + most, structure.queries)) for start in starts]
    key_spans = [_key_span(structure, span, items.first_keys, composer) for span in query_spans]
    order = buffers[composer.in_place]
    if composer.in_place and all(factors is None or factors.static is None for factors in (items.pre, items.post)):
        order = [*order[:-1], 0]  # only static matrices need scratch
    largest = min(most, structure.queries) * heads * max(map(_length, key_spans), default=0)
    memory = items.query.new_empty(max(order) + 1, largest)
    for queries, keys in zip(query_spans, key_spans, strict=True):
        if not _length(keys):
            continue
        maps = _view_maps(memory, _length(queries), heads, _length(keys), composer.in_place)
        mask = None if items.mask is None else mask_of_chunk(items.mask, queries, keys)
        first_keys = None if items.first_keys is None else items.first_keys[:, queries] - keys.start
        visibility = ChunkVisibility(items.num_items, structure, queries, keys, mask, first_keys)
        fits = composer.in_place or _length(queries) == most
        yield QueryChunk(visibility, [maps[index] for index in order], composer if fits else STEPWISE)


def _view_maps(memory: Tensor, queries: int, heads: int, keys: int, in_place: bool) -> Tensor:
    """The start of each row of `memory` `[buffers, elements]` as maps: `[buffers, c, bH, n]`.

    Maps that are worked on in place are `[bH, c, n]` in memory, others `[c, bH, n]`.
    """
    maps = memory[:, : queries * heads * keys]
    if in_place:
        return maps.view(-1, heads, queries, keys).transpose(1, 2)
    return maps.view(-1, queries, heads, keys)


def _chunk_queries(structure: Structure, heads: int, composer: ChunkComposer) -> int:
    """How many queries a chunk has, for `heads` heads of one item.

    With a sliding window they are few, because a chunk works for each query on all keys that any of its queries sees.
    """
    sizes, most = (CHUNK_QUERIES_IN_PLACE, LARGEST_MAP_IN_PLACE) if composer.in_place else (CHUNK_QUERIES, LARGEST_MAP)
    for queries in sizes:
        keys = _length(structure.reach(slice(max(0, structure.queries - queries), structure.queries)))
        few = structure.sliding_window is None or not composer.in_place or 3 * queries <= structure.sliding_window
        if few and queries * heads * keys <= most:
            return queries
    return sizes[-1]


def _key_span(structure: Structure, queries: slice, first_keys: Tensor | None, composer: ChunkComposer) -> slice:
    """The keys that a chunk works on: those that any of its queries sees, and hidden ones up to a suitable number.

    Args:
        first_keys: `[b, T]`. Keys before the first of them are left out, unless reading it would wait for a device.
    """
    span = structure.reach(queries)
    if first_keys is not None and first_keys.device.type == "cpu":
        first = max(span.start, int(first_keys[:, queries].min()))
        span = slice(first, max(first, span.stop))
    if not composer.in_place or span.stop == span.start:
        return span
    multiples = -(-_length(span) // KEY_MULTIPLE)
    wanted = (multiples + 1 - multiples % 2) * KEY_MULTIPLE
    stop = min(structure.keys, span.start + wanted)
    start = max(0, stop - wanted)
    return slice(start, stop) if stop - start == wanted else span


def _length(span: slice) -> int:
    return span.stop - span.start


def mask_of_items(mask: Tensor, span: slice) -> Tensor:
    """The part of a mask `[B or 1, H or 1, T or 1, S or 1]`, or of its gradient, that belongs to the items `span`."""
    return mask[span] if mask.shape[0] > 1 else mask


def mask_of_chunk(mask: Tensor, queries: slice, keys: slice) -> Tensor:
    """The part of a mask, or of its gradient, that broadcasts to a chunk: `[b or 1, H or 1, c or 1, n or 1]`."""
    return mask[..., queries if mask.shape[2] > 1 else slice(None), keys if mask.shape[3] > 1 else slice(None)]
