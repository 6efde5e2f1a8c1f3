"""The loop of `dcmha_chunked` over items and chunks of queries, as an operator that autograd and compilers know."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .dcmha_chunked_choice import choose_composer
from .dcmha_chunked_core import (
    Composer,
    Gradients,
    Mixing,
    Products,
    Sight,
    Stage,
    attend_chunk,
    attend_chunk_backward,
)
from .dcmha_chunked_stepwise import STEPWISE
from .masking import Structure

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


class Inputs(NamedTuple):
    """All tensors; rows are packed as in `Stage`."""

    query: Tensor  # [B, H, T, D]
    key: Tensor  # [B, H_kv, S, D]
    value: Tensor  # [B, H_kv, S, D]
    pre_query: Tensor | None  # [B, T, rows, H]
    pre_key: Tensor | None  # [B, S, rows, H]
    pre_static: Tensor | None  # [H, H]
    post_query: Tensor | None
    post_key: Tensor | None
    post_static: Tensor | None
    mask: Tensor | None  # four dimensions that broadcast to [B, H, T, S]
    first_keys: Tensor | None  # [B, T], integers; this has no gradient


class Settings(NamedTuple):
    """All else."""

    scaling: float
    is_causal: bool
    sliding_window: int | None
    pre_groups: int
    post_groups: int


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


def attend(inputs: Inputs, settings: Settings) -> Tensor:
    """Returns `[B, T, H, D]`, without gradients: call it through `attend_op`."""
    batch, heads, queries, width = inputs.query.shape
    dtype = torch.promote_types(inputs.query.dtype, torch.float32)
    output = inputs.query.new_zeros((batch, queries, heads, width), dtype=dtype)
    structure = _structure(inputs, settings)
    composer = _composer(inputs, structure, dtype)
    for span in _spans(inputs, structure, composer):
        items = _items(inputs, settings, span, dtype)
        key_columns, value = _columns(items.key), items.value.contiguous()
        for chunk in _chunks(structure, items, composer, FORWARD_BUFFERS):
            sight = chunk.sight
            rows = output.new_empty(items.query.shape[0], sight.queries.stop - sight.queries.start, width)
            attend_chunk(
                rows,
                items.query[:, sight.queries].contiguous(),
                key_columns[:, :, sight.keys],
                value[:, sight.keys],
                settings.scaling,
                chunk.mixing(items),
                chunk.buffers,
            )
            output[span, sight.queries] = rows.view(items.number, heads, -1, width).transpose(1, 2)
    return output.to(inputs.query.dtype)


def attend_backward(grad_output: Tensor, inputs: Inputs, settings: Settings, mask_needs_grad: bool) -> list[Tensor]:
    """Returns the gradients of those `inputs` that are there; the mask's is empty where it is not needed."""
    dtype = torch.promote_types(inputs.query.dtype, torch.float32)
    structure = _structure(inputs, settings)
    composer = _composer(inputs, structure, dtype)
    sums = _Sums(inputs, settings, dtype, mask_needs_grad)
    for span in _spans(inputs, structure, composer):
        items = _items(inputs, settings, span, dtype)
        key, key_columns, value_columns = items.key.contiguous(), _columns(items.key), _columns(items.value)
        for chunk in _chunks(structure, items, composer, BACKWARD_BUFFERS):
            sight = chunk.sight
            attend_chunk_backward(
                sums.products(span, chunk),
                sums.gradients(span, chunk),
                grad_output[span, sight.queries].transpose(1, 2).flatten(0, 1).to(dtype).contiguous(),
                items.query[:, sight.queries].contiguous(),
                key[:, sight.keys],
                key_columns[:, :, sight.keys],
                value_columns[:, :, sight.keys],
                settings.scaling,
                chunk.mixing(items),
                chunk.buffers,
            )
    return sums.results()


class _Sums:
    """The gradients of all inputs while they add up, in the working dtype; keys last where `Stage` has them last."""

    def __init__(self, inputs: Inputs, settings: Settings, dtype: torch.dtype, mask_needs_grad: bool) -> None:
        self.inputs, self.settings, self.mask_needs_grad = inputs, settings, mask_needs_grad
        self.sums: dict[str, Tensor] = {}
        for name, tensor in zip(Inputs._fields, inputs, strict=True):
            if tensor is None or name == "first_keys":
                continue
            shape = list(tensor.shape)
            if name.endswith("_key"):
                shape = [shape[0], shape[2], shape[3], shape[1]]
            if name == "mask" and not mask_needs_grad:
                shape = [0]
            self.sums[name] = tensor.new_zeros(shape, dtype=dtype)

    def products(self, span: slice, chunk: Chunk) -> Products:
        places = {"query": chunk.sight.queries, "key": chunk.sight.keys, "value": chunk.sight.keys}
        return Products(**{name: self.sums[name][span].flatten(0, 1)[:, place] for name, place in places.items()})

    def gradients(self, span: slice, chunk: Chunk) -> Gradients:
        mask = _of_items(self.sums["mask"], span) if self.mask_needs_grad else None
        return Gradients(
            chunk.of(self._stage("pre", span, self.settings.pre_groups)),
            chunk.of(self._stage("post", span, self.settings.post_groups)),
            None if mask is None else _of_mask(mask, chunk.sight.queries, chunk.sight.keys),
        )

    def _stage(self, name: str, span: slice, groups: int) -> Stage:
        query, key = self.sums.get(f"{name}_query"), self.sums.get(f"{name}_key")
        static = self.sums.get(f"{name}_static")
        return Stage(None if query is None else query[span], None if key is None else key[span], static, groups)

    def results(self) -> list[Tensor]:
        for name in self.sums:
            if name.endswith("_key"):
                self.sums[name] = self.sums[name].permute(0, 3, 1, 2)
        return [tensor.to(getattr(self.inputs, name).dtype).contiguous() for name, tensor in self.sums.items()]


def _structure(inputs: Inputs, settings: Settings) -> Structure:
    queries, keys = inputs.query.shape[2], inputs.key.shape[2]
    return Structure(queries, keys, settings.is_causal, settings.sliding_window)


def _composer(inputs: Inputs, structure: Structure, dtype: torch.dtype) -> Composer:
    queries = structure.queries
    keys_of_all = structure.reach(slice(0, queries))
    batch, heads = inputs.query.shape[:2]
    elements = batch * heads * queries * (keys_of_all.stop - keys_of_all.start) // 2
    return choose_composer(inputs.query.device, dtype, elements)


def _spans(inputs: Inputs, structure: Structure, composer: Composer) -> list[slice]:
    """Which items of the batch are worked on at once: where maps are small, several, to make products larger."""
    batch, heads = inputs.query.shape[:2]
    rows = min(_rows(structure, heads, composer), structure.queries)
    reach = structure.reach(slice(structure.queries - rows, structure.queries))
    most = ITEMS_IN_PLACE // max(1, rows * heads * (reach.stop - reach.start)) if composer.in_place else 1
    count = -(-batch // max(1, min(most, batch)))  # of spans, which share the items evenly
    return [slice(index * batch // count, (index + 1) * batch // count) for index in range(count)]


def _items(inputs: Inputs, settings: Settings, span: slice, dtype: torch.dtype) -> Items:
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
        None if inputs.mask is None else _of_items(inputs.mask, span),
        None if inputs.first_keys is None else inputs.first_keys[span].to(inputs.query.device, torch.int64),
    )


def _columns(rows: Tensor) -> Tensor:
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


def _chunks(
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
        mask = None if items.mask is None else _of_mask(items.mask, queries, keys)
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


def _of_items(mask: Tensor, span: slice) -> Tensor:
    """The part of a mask, or of its gradient, that belongs to some items of the batch."""
    return mask[span] if mask.shape[0] > 1 else mask


def _of_mask(mask: Tensor, queries: slice, keys: slice) -> Tensor:
    """The part of a mask, or of its gradient, that broadcasts to a chunk: `[b or 1, H or 1, c or 1, n or 1]`."""
    return mask[..., queries if mask.shape[2] > 1 else slice(None), keys if mask.shape[3] > 1 else slice(None)]


@torch.library.custom_op("dynattn::dcmha_chunked", mutates_args=())
def _forward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre_query: Tensor | None,
    pre_key: Tensor | None,
    pre_static: Tensor | None,
    post_query: Tensor | None,
    post_key: Tensor | None,
    post_static: Tensor | None,
    mask: Tensor | None,
    first_keys: Tensor | None,
    scaling: float,
    is_causal: bool,
    sliding_window: int | None,
    pre_groups: int,
    post_groups: int,
) -> Tensor:
    factors = (pre_query, pre_key, pre_static, post_query, post_key, post_static)
    inputs = Inputs(query, key, value, *factors, mask, first_keys)
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        return attend(inputs, Settings(scaling, is_causal, sliding_window, pre_groups, post_groups))


@torch.library.custom_op("dynattn::dcmha_chunked_backward", mutates_args=())
def _backward_op(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre_query: Tensor | None,
    pre_key: Tensor | None,
    pre_static: Tensor | None,
    post_query: Tensor | None,
    post_key: Tensor | None,
    post_static: Tensor | None,
    mask: Tensor | None,
    first_keys: Tensor | None,
    scaling: float,
    is_causal: bool,
    sliding_window: int | None,
    pre_groups: int,
    post_groups: int,
    mask_needs_grad: bool,
) -> list[Tensor]:
    factors = (pre_query, pre_key, pre_static, post_query, post_key, post_static)
    inputs = Inputs(query, key, value, *factors, mask, first_keys)
    settings = Settings(scaling, is_causal, sliding_window, pre_groups, post_groups)
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        return attend_backward(grad_output, inputs, settings, mask_needs_grad)


@_forward_op.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    batch, heads, queries, width = query.shape
    return query.new_empty(batch, queries, heads, width)


@_backward_op.register_fake
def _(grad_output: Tensor, *arguments: Any) -> list[Tensor]:
    *tensors, mask, _ = arguments[: len(Inputs._fields)]
    grads = [tensor.new_empty(tensor.shape) for tensor in tensors if tensor is not None]
    if mask is not None:
        grads.append(mask.new_empty(mask.shape if arguments[-1] else 0))
    return grads


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[: len(Inputs._fields)])
    ctx.settings = inputs[len(Inputs._fields) :]


def _differentiate(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    mask_needs_grad = ctx.needs_input_grad[Inputs._fields.index("mask")]
    grads = iter(_backward_op(grad_output, *tensors, *ctx.settings, mask_needs_grad))
    given = [None if tensor is None else next(grads) for tensor in tensors[:-1]]
    if not mask_needs_grad:
        given[-1] = None
    return *given, None, *(None for _ in ctx.settings)


_forward_op.register_autograd(_differentiate, setup_context=_save)


def attend_op(inputs: Inputs, settings: Settings) -> Tensor:
    """`attend`, differentiable; one node in a compiled graph."""
    return _forward_op(*inputs, *settings)
