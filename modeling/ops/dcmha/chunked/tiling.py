"""How the work is cut into items of the batch and chunks of queries."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...masking import Structure
from .arguments import Inputs, Settings
from .chunk import Mixing
from .composers.choice import choose_composer
from .composers.interface import Composer, Sight, Stage
from .composers.stepwise import STEPWISE

# Queries of a chunk: as many as keep one map within `LARGEST_MAP` elements, or the last of these. More make the matrix
# products faster, fewer keep maps in the processor's cache.
ROWS = (64, 32, 16)
LARGEST_MAP = 1 << 25
# Where maps are worked on in place, in the cache. Odd multiples of four queries and of 16 keys put the rows of
# different heads into different parts of that cache.
ROWS_IN_PLACE = (60, 28, 12)
LARGEST_MAP_IN_PLACE = 1 << 23
KEYS_IN_PLACE = 16
KEYS_AT_ONCE = 64
# Items of the batch share a chunk while its maps stay within this many elements.
ITEMS_IN_PLACE = 1 << 20

# Which of a chunk's buffers are the same memory, (not in place, in place); the last one is scratch.
FORWARD_BUFFERS = ([0, 1, 2], [0, 0, 1])
BACKWARD_BUFFERS = ([0, 1, 2, 3, 4], [0, 1, 1, 2, 3])


class Items(NamedTuple):
    """Some items of the batch, in the dtype that the work is done in; to matrix products all their heads are alike."""

    number: int  # b
    query: Tensor  # [bH, T, D]
    key: Tensor  # [bH_kv, S, D]
    value: Tensor  # [bH_kv, S, D]
    pre: Stage | None
    post: Stage | None
    mask: Tensor | None  # [b or 1, H or 1, T or 1, S or 1]
    first_keys: Tensor | None  # [b, T], int64


class Chunk(NamedTuple):
    """Some queries, the keys in their reach, room for maps `[c, bH, n]` over both, and how to compose them."""

    sight: Sight
    buffers: list[Tensor]
    composer: Composer

    def of(self, stage: Stage | None) -> Stage | None:
        """The factors, or the sums of gradients, of these queries and keys."""
        if stage is None:
            return None
        query = None if stage.query is None else stage.query[:, self.sight.queries]
        key = None if stage.key is None else stage.key[..., self.sight.keys]
        return Stage(query, key, stage.static, stage.groups)

    def mixing(self, items: Items) -> Mixing:
        """What happens to the chunk's maps."""
        return Mixing(self._factors(items.pre), self._factors(items.post), self.sight, self.composer)

    def _factors(self, stage: Stage | None) -> Stage | None:
        part = self.of(stage)
        if part is None or part.key is None or self.composer.in_place:
            return part
        return part._replace(key=part.key.contiguous())


def structure_of(inputs: Inputs, settings: Settings) -> Structure:
    """Which keys each query may see by position alone."""
    queries, keys = inputs.query.shape[2], inputs.key.shape[2]
    return Structure(queries, keys, settings.is_causal, settings.sliding_window)


def composer_for(inputs: Inputs, structure: Structure, dtype: torch.dtype) -> Composer:
    """The composer for a call, chosen by its device, dtype and number of (head, query, key) triples."""
    queries = structure.queries
    keys_of_all = structure.reach(slice(0, queries))
    batch, heads = inputs.query.shape[:2]
    elements = batch * heads * queries * (keys_of_all.stop - keys_of_all.start) // 2
    return choose_composer(inputs.query.device, dtype, elements)


def item_spans(inputs: Inputs, structure: Structure, composer: Composer) -> list[slice]:
    """Which items of the batch are worked on at once: where maps are small, several, to make products larger."""
    batch, heads = inputs.query.shape[:2]
    rows = min(_rows(structure, heads, composer), structure.queries)
    reach = structure.reach(slice(structure.queries - rows, structure.queries))
    most = ITEMS_IN_PLACE // max(1, rows * heads * (reach.stop - reach.start)) if composer.in_place else 1
    count = -(-batch // max(1, min(most, batch)))  # of spans, which share the items evenly
    return [slice(index * batch // count, (index + 1) * batch // count) for index in range(count)]


def read_items(inputs: Inputs, settings: Settings, span: slice, dtype: torch.dtype) -> Items:
    """The inputs of the batch rows `span`, in `dtype` and laid out as a chunk reads them."""

    def stage(query: Tensor | None, key: Tensor | None, static: Tensor | None, groups: int) -> Stage | None:
        if query is None and key is None and static is None:
            return None
        return Stage(
            None if query is None else query[span].to(dtype).contiguous(),
            None if key is None else _keys_last(key[span].to(dtype).permute(0, 2, 3, 1)),
            None if static is None else static.to(dtype),
            groups,
        )

    return Items(
        span.stop - span.start,
        inputs.query[span].to(dtype).flatten(0, 1),
        inputs.key[span].to(dtype).flatten(0, 1),
        inputs.value[span].to(dtype).flatten(0, 1),
        stage(inputs.pre_query, inputs.pre_key, inputs.pre_static, settings.pre_groups),
        stage(inputs.post_query, inputs.post_key, inputs.post_static, settings.post_groups),
        None if inputs.mask is None else mask_of_items(inputs.mask, span),
        None if inputs.first_keys is None else inputs.first_keys[span].to(inputs.query.device, torch.int64),
    )


def columns_of(rows: Tensor) -> Tensor:
    """`[bH_kv, S, D]` to `[bH_kv, D, S]`, which products with queries read faster."""
    return _keys_last(rows.transpose(1, 2))


def _keys_last(rows: Tensor) -> Tensor:
    """A contiguous copy of `[..., S]` whose keys lie far apart, in parts: all at once, they would miss the caches."""
    if rows.device.type != "cpu":
        return rows.contiguous()
    copy = torch.empty_like(rows, memory_format=torch.contiguous_format)
    for part, of in zip(copy.split(KEYS_AT_ONCE, -1), rows.split(KEYS_AT_ONCE, -1), strict=True):
        part.copy_(of)
    return copy


def query_chunks(
    structure: Structure, items: Items, composer: Composer, buffers: tuple[list[int], list[int]]
) -> Iterator[Chunk]:
    """Chunks of queries that see any key; they share the memory of their buffers.

    A last chunk of another size is composed step by step where code is compiled for one number of queries.
    """
    heads = items.query.shape[0]
    rows = _rows(structure, heads // items.number, composer)
    spans = [slice(start, min(start + rows, structure.queries)) for start in range(0, structure.queries, rows)]
    reaches = [_reach(structure, span, items.first_keys, composer) for span in spans]
    widest = max((reach.stop - reach.start for reach in reaches), default=0)
    order = buffers[composer.in_place]
    if composer.in_place and all(stage is None or stage.static is None for stage in (items.pre, items.post)):
        order = [*order[:-1], 0]  # only static matrices need scratch
    memory = items.query.new_empty(max(order) + 1, min(rows, structure.queries) * heads * widest)
    for queries, keys in zip(spans, reaches, strict=True):
        count, width = queries.stop - queries.start, keys.stop - keys.start
        if not width:
            continue
        maps = memory[:, : count * heads * width]
        if composer.in_place:
            maps = maps.view(-1, heads, count, width).transpose(1, 2)
        else:
            maps = maps.view(-1, count, heads, width)
        mask = None if items.mask is None else mask_of_chunk(items.mask, queries, keys)
        first_keys = None if items.first_keys is None else items.first_keys[:, queries] - keys.start
        sight = Sight(items.number, structure, queries, keys, mask, first_keys)
        fits = composer.in_place or count == rows
        yield Chunk(sight, [maps[index] for index in order], composer if fits else STEPWISE)


def _rows(structure: Structure, heads: int, composer: Composer) -> int:
    """How many queries a chunk has: few where each sees few keys, since a chunk works on all that any of them sees."""
    sizes, most = (ROWS_IN_PLACE, LARGEST_MAP_IN_PLACE) if composer.in_place else (ROWS, LARGEST_MAP)
    for rows in sizes:
        reach = structure.reach(slice(max(0, structure.queries - rows), structure.queries))
        few = structure.sliding_window is None or not composer.in_place or 3 * rows <= structure.sliding_window
        if few and rows * heads * (reach.stop - reach.start) <= most:
            return rows
    return sizes[-1]


def _reach(structure: Structure, queries: slice, first_keys: Tensor | None, composer: Composer) -> slice:
    """The keys that a chunk works on, widened by hidden ones to a number that suits the processor's cache.

    First keys on another device are not waited for.
    """
    reach = structure.reach(queries)
    if first_keys is not None and first_keys.device.type == "cpu":
        first = max(reach.start, int(first_keys[:, queries].min()))
        reach = slice(first, max(first, reach.stop))
    if not composer.in_place or reach.stop == reach.start:
        return reach
    count = -(-(reach.stop - reach.start) // KEYS_IN_PLACE)
    wanted = (count + 1 - count % 2) * KEYS_IN_PLACE
    stop = min(structure.keys, reach.start + wanted)
    start = max(0, stop - wanted)
    return slice(start, stop) if stop - start == wanted else reach


def mask_of_items(mask: Tensor, span: slice) -> Tensor:
    """The part of a mask, or of its gradient, that belongs to some items of the batch."""
    return mask[span] if mask.shape[0] > 1 else mask


def mask_of_chunk(mask: Tensor, queries: slice, keys: slice) -> Tensor:
    """The part of a mask, or of its gradient, that broadcasts to a chunk: `[b or 1, H or 1, c or 1, n or 1]`."""
    return mask[..., queries if mask.shape[2] > 1 else slice(None), keys if mask.shape[3] > 1 else slice(None)]
