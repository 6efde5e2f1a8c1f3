"""The forward and the backward pass of the chunked op, over items of the batch and chunks of queries."""

import torch
from torch import Tensor

from .arguments import Inputs, Settings
from .chunk import Gradients, Products, attend_chunk, attend_chunk_backward
from .composers.interface import Stage
from .tiling import (
    BACKWARD_BUFFERS,
    FORWARD_BUFFERS,
    Chunk,
    columns_of,
    composer_for,
    item_spans,
    mask_of_chunk,
    mask_of_items,
    query_chunks,
    read_items,
    structure_of,
)


def attend(inputs: Inputs, settings: Settings) -> Tensor:
    """Returns `[B, T, H, D]`, without gradients: call it through `attend_op`."""
    batch, heads, queries, width = inputs.query.shape
    dtype = torch.promote_types(inputs.query.dtype, torch.float32)
    output = inputs.query.new_zeros((batch, queries, heads, width), dtype=dtype)
    structure = structure_of(inputs, settings)
    composer = composer_for(inputs, structure, dtype)
    for span in item_spans(inputs, structure, composer):
        items = read_items(inputs, settings, span, dtype)
        key_columns, value = columns_of(items.key), items.value.contiguous()
        for chunk in query_chunks(structure, items, composer, FORWARD_BUFFERS):
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
    structure = structure_of(inputs, settings)
    composer = composer_for(inputs, structure, dtype)
    sums = _Sums(inputs, settings, dtype, mask_needs_grad)
    for span in item_spans(inputs, structure, composer):
        items = read_items(inputs, settings, span, dtype)
        key, key_columns, value_columns = items.key.contiguous(), columns_of(items.key), columns_of(items.value)
        for chunk in query_chunks(structure, items, composer, BACKWARD_BUFFERS):
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
        mask = mask_of_items(self.sums["mask"], span) if self.mask_needs_grad else None
        return Gradients(
            chunk.of(self._stage("pre", span, self.settings.pre_groups)),
            chunk.of(self._stage("post", span, self.settings.post_groups)),
            None if mask is None else mask_of_chunk(mask, chunk.sight.queries, chunk.sight.keys),
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
