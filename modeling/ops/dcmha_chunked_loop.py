"""The loop of `dcmha_chunked` over batch items and chunks, as an operator that autograd and compilers know."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .dcmha_chunked_core import ChunkGradients, Composer, Stage, attend_chunk, attend_chunk_backward
from .dcmha_chunked_fused import choose_composer
from .dcmha_chunked_stepwise import STEPWISE
from .masking import Structure, split_mask

# Queries of a chunk: more make the matrix products faster, fewer keep the maps in the processor's cache.
ROWS = 64
# Where one map of a chunk would have more elements than this, chunks have fewer queries, down to `LEAST_ROWS`.
LARGEST_MAP = 1 << 25
LEAST_ROWS = 16


class Inputs(NamedTuple):
    """All that the op differentiates; rows are packed as in `Stage`."""

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


class Settings(NamedTuple):
    """All else."""

    scaling: float
    is_causal: bool
    sliding_window: int | None
    pre_groups: int
    post_groups: int


class Item(NamedTuple):
    """One item of the batch, in the dtype that the work is done in."""

    query: Tensor  # [H, T, D], scaled
    key: Tensor  # [H_kv, D, S], contiguous
    value: Tensor  # [H_kv, S, D]
    pre: Stage | None
    post: Stage | None
    mask: Tensor | None  # [H or 1, T or 1, S or 1]


class Chunk(NamedTuple):
    """Some queries, the keys in their reach, room for maps `[c, H, n]` over both, and how to compose them."""

    queries: slice
    keys: slice
    buffers: list[Tensor]
    composer: Composer

    def of(self, stage: Stage | None) -> Stage | None:
        """The factors of these queries and keys."""
        if stage is None:
            return None
        query = None if stage.query is None else stage.query[self.queries]
        key = None if stage.key is None else stage.key[:, :, self.keys].contiguous()
        return Stage(query, key, stage.static, stage.groups)


def attend(inputs: Inputs, settings: Settings) -> Tensor:
    """Returns `[B, T, H, D]`, without gradients: call it through `attend_op`."""
    batch, heads, queries, width = inputs.query.shape
    dtype = torch.promote_types(inputs.query.dtype, torch.float32)
    output = inputs.query.new_zeros((batch, queries, heads, width), dtype=dtype)
    structure = _structure(inputs, settings)
    composer = _composer(inputs, structure)
    for index in range(batch):
        item = _item(inputs, settings, index, dtype)
        for chunk in _chunks(structure, item, composer, buffers=3):
            attend_chunk(
                output[index, chunk.queries],
                item.query[:, chunk.queries],
                item.key[:, :, chunk.keys],
                item.value[:, chunk.keys],
                chunk.of(item.pre),
                chunk.of(item.post),
                partial(_hide, structure=structure, mask=item.mask, chunk=chunk),
                chunk.composer,
                chunk.buffers,
            )
    return output.to(inputs.query.dtype)


def attend_backward(grad_output: Tensor, inputs: Inputs, settings: Settings, mask_needs_grad: bool) -> list[Tensor]:
    """Returns the gradients of those `inputs` that are there; the mask's is empty where it is not needed."""
    dtype = torch.promote_types(inputs.query.dtype, torch.float32)
    structure = _structure(inputs, settings)
    composer = _composer(inputs, structure)
    sums = _Sums(inputs, dtype, mask_needs_grad)
    for index in range(inputs.query.shape[0]):
        item = _item(inputs, settings, index, dtype)
        transposed_value = item.value.transpose(1, 2).contiguous()
        for chunk in _chunks(structure, item, composer, buffers=5):
            for_pre, for_post, for_mask = attend_chunk_backward(
                sums.of_chunk(index, chunk),
                grad_output[index, chunk.queries].transpose(0, 1).to(dtype),
                item.query[:, chunk.queries],
                item.key[:, :, chunk.keys],
                transposed_value[:, :, chunk.keys],
                chunk.of(item.pre),
                chunk.of(item.post),
                partial(_hide, structure=structure, mask=item.mask, chunk=chunk),
                chunk.composer,
                chunk.buffers,
            )
            sums.add("pre", for_pre, index, chunk)
            sums.add("post", for_post, index, chunk)
            if mask_needs_grad:
                sums.add_mask(for_mask, index, chunk)
    return sums.results(settings.scaling)


class _Sums:
    """The gradients of all inputs while they add up, in the working dtype; keys last where `Stage` has them last."""

    def __init__(self, inputs: Inputs, dtype: torch.dtype, mask_needs_grad: bool) -> None:
        self.inputs = inputs
        self.sums: dict[str, Tensor] = {}
        for name, tensor in zip(Inputs._fields, inputs, strict=True):
            if tensor is None:
                continue
            shape = list(tensor.shape)
            if name.endswith("_key"):
                shape = [shape[0], shape[2], shape[3], shape[1]]
            if name == "mask" and not mask_needs_grad:
                shape = [0]
            self.sums[name] = tensor.new_zeros(shape, dtype=dtype)

    def of_chunk(self, index: int, chunk: Chunk) -> ChunkGradients:
        return ChunkGradients(
            self.sums["query"][index, :, chunk.queries],
            self.sums["key"][index, :, chunk.keys],
            self.sums["value"][index, :, chunk.keys],
        )

    def add(self, name: str, stage: Stage | None, index: int, chunk: Chunk) -> None:
        if stage is None:
            return
        if stage.query is not None:
            self.sums[f"{name}_query"][index, chunk.queries] = stage.query
        if stage.key is not None:
            self.sums[f"{name}_key"][index, :, :, chunk.keys] += stage.key
        if stage.static is not None:
            self.sums[f"{name}_static"] += stage.static

    def add_mask(self, grad_scores: Tensor, index: int, chunk: Chunk) -> None:
        total = _of_mask(self.sums["mask"], index, chunk)
        total += grad_scores.transpose(0, 1).sum_to_size(total.shape)

    def results(self, scaling: float) -> list[Tensor]:
        self.sums["query"] *= scaling
        for name in self.sums:
            if name.endswith("_key"):
                self.sums[name] = self.sums[name].permute(0, 3, 1, 2)
        return [tensor.to(getattr(self.inputs, name).dtype).contiguous() for name, tensor in self.sums.items()]


def _structure(inputs: Inputs, settings: Settings) -> Structure:
    queries, keys = inputs.query.shape[2], inputs.key.shape[2]
    return Structure(queries, keys, settings.is_causal, settings.sliding_window)


def _composer(inputs: Inputs, structure: Structure) -> Composer:
    queries = structure.queries
    keys_of_all = structure.reach(slice(0, queries))
    batch, heads = inputs.query.shape[:2]
    return choose_composer(batch * heads * queries * (keys_of_all.stop - keys_of_all.start) // 2)


def _item(inputs: Inputs, settings: Settings, index: int, dtype: torch.dtype) -> Item:
    def stage(query: Tensor | None, key: Tensor | None, static: Tensor | None, groups: int) -> Stage | None:
        if query is None and key is None and static is None:
            return None
        return Stage(
            None if query is None else query[index].to(dtype),
            None if key is None else key[index].to(dtype).permute(1, 2, 0).contiguous(),
            None if static is None else static.to(dtype),
            groups,
        )

    return Item(
        inputs.query[index].to(dtype) * settings.scaling,
        inputs.key[index].to(dtype).transpose(1, 2).contiguous(),
        inputs.value[index].to(dtype),
        stage(inputs.pre_query, inputs.pre_key, inputs.pre_static, settings.pre_groups),
        stage(inputs.post_query, inputs.post_key, inputs.post_static, settings.post_groups),
        None if inputs.mask is None else inputs.mask[index if inputs.mask.shape[0] > 1 else 0],
    )


def _chunks(structure: Structure, item: Item, composer: Composer, buffers: int) -> Iterator[Chunk]:
    """Chunks of queries that see any key; they share the memory of their buffers.

    A last chunk of another size is composed step by step: compiled code is made for one number of queries.
    """
    heads = item.query.shape[0]
    rows = ROWS
    while rows > LEAST_ROWS and rows * heads * structure.keys > LARGEST_MAP:
        rows //= 2
    spans = [slice(start, min(start + rows, structure.queries)) for start in range(0, structure.queries, rows)]
    reaches = [structure.reach(span) for span in spans]
    widest = max(reach.stop - reach.start for reach in reaches)
    memory = item.query.new_empty(buffers, min(rows, structure.queries) * heads * widest)
    for queries, keys in zip(spans, reaches, strict=True):
        count, width = queries.stop - queries.start, keys.stop - keys.start
        if width:
            maps = memory[:, : count * heads * width].view(buffers, count, heads, width)
            yield Chunk(queries, keys, list(maps.unbind()), composer if count == rows else STEPWISE)


def _hide(scores: Tensor, structure: Structure, mask: Tensor | None, chunk: Chunk) -> Tensor | None:
    """Sets hidden scores `[c, H, n]` to minus infinity; returns where rows are empty, or None where none can be."""
    for edge in structure.edges(chunk.queries, chunk.keys):
        hidden = ~structure.visible(chunk.queries, edge, scores.device)
        columns = slice(edge.start - chunk.keys.start, edge.stop - chunk.keys.start)
        scores[:, :, columns].masked_fill_(hidden[:, None], -torch.inf)
    visible, bias = split_mask(None if mask is None else _of_mask(mask[None], 0, chunk).transpose(0, 1))
    if bias is not None:
        scores += bias
    if visible is not None:
        scores.masked_fill_(~visible, -torch.inf)
    elif structure.queries <= structure.keys:
        return None
    return scores.amax(-1, keepdim=True) == -torch.inf


def _of_mask(mask: Tensor, index: int, chunk: Chunk) -> Tensor:
    """The part of a mask, or of its gradient, that broadcasts to a chunk: `[H or 1, c or 1, n or 1]`."""
    batch, _, queries, keys = mask.shape
    rows = chunk.queries if queries > 1 else slice(None)
    columns = chunk.keys if keys > 1 else slice(None)
    return mask[index if batch > 1 else 0, :, rows, columns]


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
    scaling: float,
    is_causal: bool,
    sliding_window: int | None,
    pre_groups: int,
    post_groups: int,
) -> Tensor:
    tensors = (query, key, value, pre_query, pre_key, pre_static, post_query, post_key, post_static, mask)
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        return attend(Inputs(*tensors), Settings(scaling, is_causal, sliding_window, pre_groups, post_groups))


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
    scaling: float,
    is_causal: bool,
    sliding_window: int | None,
    pre_groups: int,
    post_groups: int,
    mask_needs_grad: bool,
) -> list[Tensor]:
    inputs = Inputs(query, key, value, pre_query, pre_key, pre_static, post_query, post_key, post_static, mask)
    settings = Settings(scaling, is_causal, sliding_window, pre_groups, post_groups)
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        return attend_backward(grad_output, inputs, settings, mask_needs_grad)


@_forward_op.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    batch, heads, queries, width = query.shape
    return query.new_empty(batch, queries, heads, width)


@_backward_op.register_fake
def _(grad_output: Tensor, *arguments: Any) -> list[Tensor]:
    *tensors, mask = arguments[: len(Inputs._fields)]
    grads = [tensor.new_empty(tensor.shape) for tensor in tensors if tensor is not None]
    if mask is not None:
        grads.append(mask.new_empty(mask.shape if arguments[-1] else 0))
    return grads


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[: len(Inputs._fields)])
    ctx.settings = inputs[len(Inputs._fields) :]


def _differentiate(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    mask_needs_grad = ctx.needs_input_grad[len(tensors) - 1]
    grads = iter(_backward_op(grad_output, *tensors, *ctx.settings, mask_needs_grad))
    given = [None if tensor is None else next(grads) for tensor in tensors]
    if not mask_needs_grad:
        given[-1] = None
    return *given, *(None for _ in ctx.settings)


_forward_op.register_autograd(_differentiate, setup_context=_save)


def attend_op(inputs: Inputs, settings: Settings) -> Tensor:
    """`attend`, differentiable; one node in a compiled graph."""
    return _forward_op(*inputs, *settings)
