"""The forward and the backward pass of the chunked op: in C code, or as loops over items and chunks in PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...dtypes import at_least_float32
from ...masking import Structure, part_of_mask
from ..composition import SIDES
from .arguments import DIFFERENTIABLE, TABLES, ChunkedInputs, ChunkedSettings
from .chunk import ChunkGradients, attend_chunk, attend_chunk_backward
from .composers.interface import StageFactors
from .distance_blocks import TableBlocks
from .passes_native import attend_backward_in_c, attend_in_c, library_for
from .tiling import (
    BACKWARD_BUFFERS,
    FORWARD_BUFFERS,
    QueryChunk,
    composer_for,
    mask_of_item,
    query_chunks,
    read_item,
    read_tables,
    transpose_rows,
)


def attend(inputs: ChunkedInputs, settings: ChunkedSettings) -> Tensor:
    """Returns the output `[B, T, H, D]`, without gradients, which only the operator of attention.py adds."""
    structure = Structure.of_call(inputs.query, inputs.key, inputs.offset, settings.is_causal, settings.sliding_window)
    library = library_for(inputs, settings)
    if library is not None:
        return attend_in_c(library, inputs, settings, structure)
    dtype = at_least_float32(inputs.query.dtype)
    output = inputs.query.new_zeros(inputs.query.shape, dtype=dtype)
    composer = composer_for(inputs, structure)
    tables = read_tables(inputs, structure, dtype)
    for index in range(len(inputs.query)):
        item = read_item(inputs, settings, index, dtype)
        key_transposed, value = transpose_rows(item.key), item.value.contiguous()
        for chunk in query_chunks(structure, item, composer, FORWARD_BUFFERS):
            queries, keys = chunk.visibility.queries, chunk.visibility.keys
            output[index, :, queries] = attend_chunk(
                item.query[:, queries].contiguous(),
                key_transposed[:, :, keys],
                value[:, keys],
                settings.scaling,
                chunk.transform(item, tables, settings.compose_bias),
                chunk.buffers,
            )
    return output.transpose(1, 2).contiguous().to(inputs.query.dtype)


def attend_backward(
    grad_output: Tensor, inputs: ChunkedInputs, settings: ChunkedSettings, wanted: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Differentiates `attend`, whose maps it computes again.

    Args:
        grad_output: `[B, T, H, D]`.
        wanted: `mask` is in it if the gradient of the mask is needed.

    Returns:
        The gradients of the inputs in `DIFFERENTIABLE`, in their shapes and in at least float32; that of the mask only
        if it is needed.
    """
    mask_needs_grad = "mask" in wanted
    structure = Structure.of_call(inputs.query, inputs.key, inputs.offset, settings.is_causal, settings.sliding_window)
    library = library_for(inputs, settings)
    if library is not None:
        return attend_backward_in_c(library, grad_output, inputs, settings, structure, mask_needs_grad)
    dtype = at_least_float32(inputs.query.dtype)
    composer = composer_for(inputs, structure)
    tables = read_tables(inputs, structure, dtype)
    gradients = _InputGradients(inputs, settings, dtype, mask_needs_grad, tables.zeros())
    for index in range(len(inputs.query)):
        item = read_item(inputs, settings, index, dtype)
        key, key_transposed = item.key.contiguous(), transpose_rows(item.key)
        value_transposed = transpose_rows(item.value)
        for chunk in query_chunks(structure, item, composer, BACKWARD_BUFFERS):
            queries, keys = chunk.visibility.queries, chunk.visibility.keys
            attend_chunk_backward(
                gradients.of_chunk(index, chunk),
                grad_output[index, queries].transpose(0, 1).to(dtype).contiguous(),
                item.query[:, queries].contiguous(),
                key[:, keys],
                key_transposed[:, :, keys],
                value_transposed[:, :, keys],
                settings.scaling,
                chunk.transform(item, tables, settings.compose_bias),
                chunk.buffers,
            )
    return gradients.results()


class _InputGradients:
    """The gradients of all inputs while chunks add to them, in the working dtype.

    They have the shapes of the inputs, with two exceptions: those of key factors are `[B, terms, H, S]`, as in
    `StageFactors`, and those of tables by distance are blocks (distance_blocks.py).
    """

    def __init__(
        self,
        inputs: ChunkedInputs,
        settings: ChunkedSettings,
        dtype: torch.dtype,
        mask_needs_grad: bool,
        blocks: TableBlocks,
    ) -> None:
        self.inputs, self.settings, self.blocks = inputs, settings, blocks
        self.sums: dict[str, Tensor] = {}
        for name in DIFFERENTIABLE:
            tensor = getattr(inputs, name)
            if tensor is None or name in TABLES or (name == "mask" and not mask_needs_grad):
                continue
            shape = list(tensor.shape)
            if name.endswith("_key"):
                shape = [shape[0], shape[2], shape[3], shape[1]]
            self.sums[name] = tensor.new_zeros(shape, dtype=dtype)

    def of_chunk(self, index: int, chunk: QueryChunk) -> ChunkGradients:
        """Views of the gradients of a chunk of an item."""
        queries, keys = chunk.visibility.queries, chunk.visibility.keys
        mask = mask_of_item(self.sums["mask"], index) if "mask" in self.sums else None
        return ChunkGradients(
            self.sums["query"][index, :, queries],
            self.sums["key"][index, :, keys],
            self.sums["value"][index, :, keys],
            chunk.part_of(self._stage("pre", index, self.settings.pre_groups)),
            chunk.part_of(self._stage("post", index, self.settings.post_groups)),
            None if mask is None else part_of_mask(mask, queries, keys),
            chunk.tables_of(self.blocks),
        )

    def _stage(self, name: str, index: int, groups: int) -> StageFactors:
        sums = [self.sums.get(f"{name}_{side}") for side in SIDES]
        query, key = (None if one is None else one[index] for one in sums)
        return StageFactors(query, key, self.sums.get(f"{name}_static"), groups)

    def results(self) -> dict[str, Tensor]:
        """The gradients as `attend_backward` returns them."""
        for name in self.sums:
            if name.endswith("_key"):
                self.sums[name] = self.sums[name].permute(0, 3, 1, 2)
        for name, block in zip(TABLES, (self.blocks.bias, self.blocks.gain), strict=True):
            if block is not None:
                self.sums[name] = self.blocks.grid.gather(block, getattr(self.inputs, name))
        return self.sums
