"""Sliding windows for `dcmha_triton`: blocks of queries, each with the keys in its reach, become items of the batch.

All blocks of a causal window have one shape, so that a chunk can be many of them, and the number of launches does not
grow with the sequence. A block of `c` queries comes with the `n` keys that end where it ends: positions before the
first key and queries after the last one are padding, which `first_keys` hide. The gradients of a key add up over the
blocks that it is in. Copies live within one pass; what is saved between passes are the inputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .dcmha_triton_arguments import MapInputs, MapSettings
from .dcmha_triton_choice import block_of, fits_in_a_chunk
from .dcmha_triton_sweeps import attend, attend_backward
from .dcmha_triton_workspace import aligned

# Where the sequence runs in each of the inputs.
QUERY_AXES = {"query": 2, "pre_query": 1, "post_query": 1}
KEY_AXES = {"key": 2, "value": 2, "pre_key": 1, "post_key": 1}


@dataclass(frozen=True)
class Blocks:
    """How `queries` queries at the end of `keys` keys are cut."""

    queries: int  # T
    keys: int  # S
    groups: int
    size: int  # c
    reach: int  # n

    @property
    def count(self) -> int:
        return -(-self.queries // self.size)

    @property
    def before(self) -> int:
        """How many keys the first block lacks, or, below zero, how many no block reaches."""
        return self.reach - self.size - (self.keys - self.queries)

    @property
    def after(self) -> int:
        """How many queries, and keys, the last block lacks."""
        return self.count * self.size - self.queries

    def of_queries(self, rows: Tensor, axis: int) -> Tensor:
        """`[B, .., T, ..]`, T at `axis`, to `[B * blocks, .., c, ..]`; padding is zero."""
        return self._cut(_pad(rows, axis, 0, self.after), axis, self.size)

    def of_keys(self, rows: Tensor, axis: int) -> Tensor:
        """`[B, .., S, ..]`, S at `axis`, to `[B * blocks, .., n, ..]`; padding is zero."""
        return self._cut(_pad(rows, axis, self.before, self.after), axis, self.reach)

    def join_queries(self, parts: Tensor, axis: int) -> Tensor:
        """What `of_queries` was made of: `[B * blocks, .., c, ..]` to `[B, .., T, ..]`."""
        return self._rows_of_batch(parts, axis).flatten(axis, axis + 1).narrow(axis, 0, self.queries)

    def add_keys(self, parts: Tensor, axis: int) -> Tensor:
        """The adjoint of `of_keys`: `[B * blocks, .., n, ..]` to `[B, .., S, ..]`, where overlapping blocks add up."""
        parts = self._rows_of_batch(parts, axis)
        pieces = parts.split(self.size, axis + 1)
        shape = list(parts.shape)
        shape[axis : axis + 2] = self.count + len(pieces) - 1, self.size
        total = parts.new_zeros(shape)
        for index, piece in enumerate(pieces):
            total.narrow(axis, index, self.count).narrow(axis + 1, 0, piece.shape[axis + 1]).add_(piece)
        total = total.flatten(axis, axis + 1)
        return _pad(total, axis, -self.before, self.keys + self.before - total.shape[axis])

    def first_keys(self, own: Tensor | None, batch: int, device: torch.device) -> Tensor:
        """The first key of the block that each query sees, `[rows of the batch * blocks, c]`; padding sees none.

        Args:
            own: the first key of each query, `[rows of the batch, T]`.
            batch: the number of items before they were cut.
        """
        if own is None:
            own = torch.zeros(batch // self.groups, self.queries, dtype=torch.int32, device=device)
        own = F.pad(own.to(device, torch.int32), (0, self.after), value=self.keys + self.size)
        starts = torch.arange(self.count, device=device, dtype=own.dtype) * self.size - self.before
        return (own.unflatten(1, (self.count, self.size)) - starts[:, None]).clamp_(min=0).flatten(0, 1)

    def mask(self, mask: Tensor, batch: int) -> Tensor:
        """A mask that broadcasts to `[rows of the batch, 1, T, S]` as one for `[rows of the batch * blocks, 1, c, n]`.

        Where padding stands, it has what the nearest query and key have.
        """
        starts = torch.arange(self.count, device=mask.device)[:, None] * self.size
        t = (starts + torch.arange(self.size, device=mask.device))[:, :, None].clamp_(max=self.queries - 1)
        s = (starts - self.before + torch.arange(self.reach, device=mask.device))[:, None].clamp_(0, self.keys - 1)
        t, s = (
            places if length > 1 else places.new_zeros(1, 1, 1)
            for places, length in zip((t, s), mask.shape[2:], strict=True)
        )
        parts = mask[:, 0][:, t, s]  # [rows of the batch or 1, blocks or 1, c or 1, n or 1]
        return parts.expand(batch // self.groups, self.count, -1, -1).flatten(0, 1)[:, None]

    def _cut(self, rows: Tensor, axis: int, length: int) -> Tensor:
        """Parts of `length` that start `c` apart, contiguous; the groups of a block are neighbours among the items."""
        parts = rows.unfold(axis, length, self.size).unflatten(0, (-1, self.groups))
        return parts.movedim((axis + 1, -1), (1, axis + 2)).flatten(0, 2).contiguous()

    def _rows_of_batch(self, parts: Tensor, axis: int) -> Tensor:
        """`[B * blocks, .., length, ..]` to `[B, .., blocks, length, ..]`."""
        return parts.unflatten(0, (-1, self.count, self.groups)).movedim(1, axis + 1).flatten(0, 1)


def choose_blocks(inputs: MapInputs, settings: MapSettings) -> Blocks | None:
    """Returns how a causal window is cut; None for what is no window, too short, or fills chunks by its batch alone."""
    if settings.sliding_window is None or not settings.is_causal:
        return None
    (batch, heads, queries, _), keys = inputs.query.shape, inputs.key.shape[2]
    size = block_of(settings.sliding_window)
    reach = aligned(settings.sliding_window - 1 + size)
    if queries < 2 * size or keys < reach or not fits_in_a_chunk(2 * batch * heads * size * reach):
        return None
    return Blocks(queries, keys, settings.groups, size, reach)


def cut_inputs(blocks: Blocks, inputs: MapInputs) -> MapInputs:
    """Returns the same problem with as many rows in place of each row of the batch as it has blocks."""
    batch, rows = inputs.query.shape[0], inputs._asdict()
    cut = {name: blocks.of_queries(rows[name], axis) for name, axis in QUERY_AXES.items() if rows[name] is not None}
    cut |= {name: blocks.of_keys(rows[name], axis) for name, axis in KEY_AXES.items() if rows[name] is not None}
    cut["first_keys"] = blocks.first_keys(inputs.first_keys, batch, inputs.query.device)
    if inputs.mask is not None:
        cut["mask"] = blocks.mask(inputs.mask, batch)
    return inputs._replace(**cut)


def attend_in_blocks(inputs: MapInputs, settings: MapSettings) -> tuple[Tensor, Tensor]:
    """`attend`, window by window where there are windows."""
    blocks = choose_blocks(inputs, settings)
    if blocks is None:
        return attend(inputs, settings)
    output, lse = attend(cut_inputs(blocks, inputs), settings)
    return blocks.join_queries(output, 1).contiguous(), blocks.join_queries(lse, 2).contiguous()


def attend_backward_in_blocks(
    grad_output: Tensor, lse: Tensor, inputs: MapInputs, settings: MapSettings
) -> dict[str, Tensor]:
    """`attend_backward`, window by window where there are windows."""
    blocks = choose_blocks(inputs, settings)
    if blocks is None:
        return attend_backward(grad_output, lse, inputs, settings)
    parts = blocks.of_queries(grad_output, 1), blocks.of_queries(lse, 2)
    grads = attend_backward(*parts, cut_inputs(blocks, inputs), settings)
    joined = {name: blocks.join_queries(grads[name], axis) for name, axis in QUERY_AXES.items() if name in grads}
    joined |= {name: blocks.add_keys(grads[name], axis) for name, axis in KEY_AXES.items() if name in grads}
    return {name: joined.get(name, grad) for name, grad in grads.items()}


def _pad(rows: Tensor, axis: int, before: int, after: int) -> Tensor:
    """Adds zeros before and after an axis, or takes away where there are less than none to add."""
    if before == after == 0:
        return rows
    return F.pad(rows, (0, 0) * (rows.ndim - 1 - axis) + (before, after))
