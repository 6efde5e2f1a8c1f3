"""Divides the work of the chunked op in PyTorch: into items, and each item into chunks of queries.

An item is a row of the batch. A chunk has `c` queries of an item and the `n` keys that any of them sees.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...masking import Structure, part_of_mask
from .arguments import ChunkedInputs, ChunkedSettings, PackedStage, stages_of
from .chunk import ScoreTransform
from .composers.choice import choose_composer
from .composers.interface import ChunkComposer, ChunkVisibility, StageFactors
from .composers.stepwise import STEPWISE
from .distance_blocks import ChunkTables, TableBlocks, grid_of

# How many queries a chunk has: the first of these numbers that keeps one map within `LARGEST_MAP` elements, or the last
# one. More queries make the matrix products faster, fewer keep maps in the processor's cache.
CHUNK_QUERIES = (64, 32, 16)
LARGEST_MAP = 1 << 25
# How many keys `_copy_keys_last` transposes at a time.
TRANSPOSED_KEYS = 64

# How many buffers of the size of its maps a chunk needs; the last one is scratch.
FORWARD_BUFFERS, BACKWARD_BUFFERS = 3, 6


class Item(NamedTuple):
    """One item of the batch in the working dtype."""

    query: Tensor  # [H, T, D]
    key: Tensor  # [H_kv, S, D]
    value: Tensor  # [H_kv, S, D]
    pre: StageFactors | None
    post: StageFactors | None
    mask: Tensor | None  # [H or 1, T or 1, S or 1]
    first_keys: Tensor | None  # [T], int64


class QueryChunk(NamedTuple):
    """Some queries of an item and the keys that any of them sees, with buffers and a composer for their maps."""

    visibility: ChunkVisibility
    buffers: list[Tensor]  # [c, H, n] each
    composer: ChunkComposer

    def part_of(self, factors: StageFactors) -> StageFactors:
        """Views of `factors`, or of their gradients, for the chunk's queries and keys."""
        query = None if factors.query is None else factors.query[self.visibility.queries]
        key = None if factors.key is None else factors.key[..., self.visibility.keys]
        return StageFactors(query, key, factors.static, factors.groups)

    def tables_of(self, blocks: TableBlocks) -> ChunkTables:
        """Views of tables by distance, or of their gradients, for the chunk's queries and keys."""
        queries, keys = self.visibility.queries, self.visibility.keys
        position = queries.start + self.visibility.structure.first_query
        return blocks.of_chunk(position, queries.stop - queries.start, keys)

    def transform(self, item: Item, blocks: TableBlocks, compose_bias: bool) -> ScoreTransform:
        """What happens to the chunk's scores, from the inputs of its item and the tables of the call."""
        stages = self._factors(item.pre), self._factors(item.post)
        return ScoreTransform(*stages, self.tables_of(blocks), compose_bias, self.visibility, self.composer)

    def _factors(self, factors: StageFactors | None) -> StageFactors | None:
        if factors is None:
            return None
        part = self.part_of(factors)
        return part if part.key is None else part._replace(key=part.key.contiguous())


def read_tables(inputs: ChunkedInputs, structure: Structure, dtype: torch.dtype) -> TableBlocks:
    """The tables of a call as blocks in `dtype`, of which the chunks of all items read views."""
    most = _chunk_queries(structure, inputs.query.shape[1])
    spans = structure.query_spans(most)
    positions, reaches = [span.start + structure.first_query for span in spans], list(map(structure.reach, spans))
    grid = grid_of(positions, reaches, most)
    tables = (inputs.position_bias, inputs.position_gain)
    return TableBlocks(grid, *(None if table is None else grid.spread(table, dtype) for table in tables))


def composer_for(inputs: ChunkedInputs, structure: Structure) -> ChunkComposer:
    """The composer for a call, chosen by its number of (head, query, key) triples."""
    keys = _length(structure.reach(slice(0, structure.queries)))
    batch, heads = inputs.query.shape[:2]
    return choose_composer(batch * heads * structure.queries * keys // 2)  # causality leaves about half of the pairs


def read_item(inputs: ChunkedInputs, settings: ChunkedSettings, index: int, dtype: torch.dtype) -> Item:
    """The inputs of an item, in `dtype` and in the layout that chunks read."""
    pre, post = (_read_stage(stage, index, dtype) for stage in stages_of(inputs, settings))
    return Item(
        inputs.query[index].to(dtype),
        inputs.key[index].to(dtype),
        inputs.value[index].to(dtype),
        pre,
        post,
        None if inputs.mask is None else mask_of_item(inputs.mask, index),
        None if inputs.first_keys is None else inputs.first_keys[index].to(torch.int64),
    )


def _read_stage(stage: PackedStage, index: int, dtype: torch.dtype) -> StageFactors | None:
    """The factors of one item; None for a stage without any."""
    query, key, static, groups = stage
    if query is None and key is None and static is None:
        return None
    return StageFactors(
        None if query is None else query[index].to(dtype).contiguous(),
        None if key is None else _copy_keys_last(key[index].to(dtype).permute(1, 2, 0)),
        None if static is None else static.to(dtype),
        groups,
    )


def transpose_rows(rows: Tensor) -> Tensor:
    """`[H_kv, S, D]` to contiguous `[H_kv, D, S]`, which products with queries read faster."""
    return _copy_keys_last(rows.transpose(1, 2))


def _copy_keys_last(view: Tensor) -> Tensor:
    """A contiguous copy of a view `[..., S]` in which neighbouring keys are far apart in memory.

    On a CPU it copies a few keys at a time, because copying all at once would miss the caches.
    """
    if view.device.type != "cpu":
        return view.contiguous()
    copy = torch.empty_like(view, memory_format=torch.contiguous_format)
    for target, source in zip(copy.split(TRANSPOSED_KEYS, -1), view.split(TRANSPOSED_KEYS, -1), strict=True):
        target.copy_(source)
    return copy


def query_chunks(structure: Structure, item: Item, composer: ChunkComposer, buffers: int) -> Iterator[QueryChunk]:
    """Yields the chunks of an item, without those whose queries see no key.

    All chunks share the memory of their `buffers` maps, so each must be done before the next one. Code is compiled for
    one number of queries, so a last chunk with fewer is composed step by step.
    """
    heads = item.query.shape[0]
    most = _chunk_queries(structure, heads)
    query_spans = structure.query_spans(most)
    key_spans = [_key_span(structure, span, item.first_keys) for span in query_spans]
    largest = min(most, structure.queries) * heads * max(map(_length, key_spans), default=0)
    memory = item.query.new_empty(buffers, largest)
    for queries, keys in zip(query_spans, key_spans, strict=True):
        if not _length(keys):
            continue
        maps = memory[:, : _length(queries) * heads * _length(keys)].view(-1, _length(queries), heads, _length(keys))
        mask = None if item.mask is None else part_of_mask(item.mask, queries, keys)
        first_keys = None if item.first_keys is None else item.first_keys[queries] - keys.start
        if first_keys is not None:
            first_keys = first_keys.to(item.query.device, non_blocking=True)  # else a device would be waited for
        visibility = ChunkVisibility(structure, queries, keys, mask, first_keys)
        yield QueryChunk(visibility, list(maps), composer if _length(queries) == most else STEPWISE)


def _chunk_queries(structure: Structure, heads: int) -> int:
    """How many queries a chunk has; see `CHUNK_QUERIES`."""
    for queries in CHUNK_QUERIES:
        keys = _length(structure.reach(slice(max(0, structure.queries - queries), structure.queries)))
        if queries * heads * keys <= LARGEST_MAP:
            return queries
    return CHUNK_QUERIES[-1]


def _key_span(structure: Structure, queries: slice, first_keys: Tensor | None) -> slice:
    """The keys that a chunk works on: those that any of its queries sees.

    Args:
        first_keys: `[T]`. Keys before the smallest one are left out, unless it is on a device, where reading it waits.
    """
    span = structure.reach(queries)
    if first_keys is not None and first_keys.device.type == "cpu":
        first = max(span.start, int(first_keys[queries].min()))
        span = slice(first, max(first, span.stop))
    return span


def _length(span: slice) -> int:
    return span.stop - span.start


def mask_of_item(mask: Tensor, index: int) -> Tensor:
    """The part of a mask `[B or 1, H or 1, T or 1, S or 1]`, or of its gradient, that belongs to an item."""
    return mask[index if len(mask) > 1 else 0]
