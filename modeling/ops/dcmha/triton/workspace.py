"""What `dcmha_triton` works on: the chunks of a problem, one after the other, and memory for the maps of one.

A chunk's scores, probabilities and their gradients are maps `[items, H, c, n]` over some items of the batch, `c`
queries and `n` keys. They live in memory that all chunks share, so that it does not grow with the number of pairs.

Scores are kept in float32 for inputs of that dtype. For half precision they are kept in float16 even where inputs are
bfloat16: three more bits of the logits for the same traffic, at the price of a limit of 65504 on their magnitude, also
where they are hidden.
Composed probabilities and gradients have the dtype of the inputs; sums over several chunks are float32.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...masking import Structure, split_mask
from .arguments import MapChunk, MapInputs, MapSettings, Sizes, Visibility, unspecialized
from .kernels.registry import load_kernels
from .tiling import add_blocks, choose_tiling
from .tuning import items_of_a_chunk, tile_of_merge

# Farther than any two positions are apart.
UNBOUNDED = 1 << 30


class Workspace:
    """The chunks, and `maps` buffers that all of them share.

    Args:
        patch: queries and keys that the sides of chunks are multiples of.
    """

    def __init__(self, inputs: MapInputs, settings: MapSettings, maps: tuple[str, ...], patch: tuple[int, int]) -> None:
        self.batch, self.heads, queries, _ = inputs.query.shape
        self.kernels = load_kernels(inputs.query.device)
        self.structure = Structure(queries, inputs.key.shape[2], settings.is_causal, settings.sliding_window)
        self.scaling, self.groups = settings.scaling, settings.groups
        self.dtype, self.device = inputs.value.dtype, inputs.query.device
        self.score_dtype = torch.float32 if self.dtype == torch.float32 else torch.float16
        self.tiling = choose_tiling(inputs, settings, patch)
        self.queries, self.keys = self.tiling.queries, self.tiling.keys
        self.mask, self.bias = self._masks(inputs.mask)
        self.first_keys = None
        if inputs.first_keys is not None:
            first_keys = inputs.first_keys.to(self.device, torch.int32)
            self.first_keys = padded(first_keys, 1, self.queries).contiguous()
        item = self.heads * self.tiling.largest
        rows = max(1, min(self.batch // self.groups, items_of_a_chunk(item * self.groups)))
        self.items = rows * self.groups
        self.memory = dict(zip(maps, inputs.value.new_empty(len(maps), self.items * item), strict=True))

    def chunks(self) -> Iterator[MapChunk]:
        """Yields all chunks but those whose queries see no key."""
        for queries, keys in self.tiling.spans:
            shape = queries.stop - queries.start, self.tiling.columns(keys)
            sizes = Sizes(*shape, self.queries, self.keys)
            for first in range(0, self.batch, self.items):
                items = slice(first, min(first + self.items, self.batch))
                where = self._visibility(slice(items.start // self.groups, None), queries, keys)
                yield MapChunk(items, queries, keys, (items.stop - items.start, *shape), sizes, where)

    def with_padding(self, rows: Tensor, axis: int, *, of_keys: bool) -> Tensor:
        """Returns rows of all positions with zeros for padding."""
        return padded(rows, axis, self.keys, self.tiling.before) if of_keys else padded(rows, axis, self.queries)

    def without_padding(self, rows: Tensor, axis: int, *, of_keys: bool) -> Tensor:
        """Returns a view of what `with_padding` was given."""
        first, length = (self.tiling.before, self.structure.keys) if of_keys else (0, self.structure.queries)
        return rows.narrow(axis, first, length)

    def add_keys(self, total: Tensor, partial: Tensor, chunk: MapChunk) -> None:
        """Adds what programs along the queries, `[items, programs, n, ..]`, say about keys to `[items, keys, ..]`."""
        step = chunk.where.step or chunk.sizes.queries
        parts = partial.unflatten(1, (chunk.sizes.queries // step, -1)).sum(2, dtype=torch.float32)
        add_blocks(total[chunk.items, chunk.keys], parts, step)

    def map(self, name: str, chunk: MapChunk, dtype: torch.dtype | None = None) -> Tensor:
        """Returns one of the shared buffers as `[items, H, c, n]`; in the dtype of the values if in no other."""
        items, queries, keys = chunk.counts
        shape = (items, self.heads, queries, keys)
        return self.memory[name][: items * self.heads * queries * keys].view(dtype or self.dtype).view(shape)

    def all_heads(self, maps: Tensor) -> Tensor:
        """`[items, H, c, n]` to `[rows of the batch, heads of all groups, c, n]`."""
        return maps.view(-1, self.groups * self.heads, *maps.shape[2:])

    def mix(self, static: Tensor, maps: Tensor, base: Tensor, out: Tensor) -> Tensor:
        """`out = base` plus what `static`, indexed [out, in], makes of `maps`."""
        maps, base, product = (self.all_heads(tensor).flatten(2) for tensor in (maps, base, out))
        torch.baddbmm(base, static.to(maps.dtype).expand(maps.shape[0], -1, -1), maps, out=product)
        return out

    def merge(self, chunk: MapChunk, partial_lse: Tensor, lse: Tensor) -> None:
        """Sets the log-sum-exp of whole rows, `[items, H, c of T]`, from that of their patches."""
        items, queries, _ = chunk.counts
        block_t, warps = tile_of_merge()
        self.kernels["dcmha_merge"][-(-queries // block_t), self.heads, items](
            partial_lse,
            lse,
            partial_lse.shape[1],
            queries,
            self.queries,
            block_t=block_t,
            num_warps=warps,
        )

    def partial_of_queries(self, chunk: MapChunk, block: int) -> Tensor:
        """Room for a number of each head and query from each block of keys: `[items, blocks, H, c]`."""
        items, queries, keys = chunk.counts
        shape = items, -(-keys // block), self.heads, queries
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def _visibility(self, rows: slice, queries: slice, keys: slice) -> Visibility:
        structure = self.structure
        window = structure.sliding_window or UNBOUNDED
        mask, bias = (None if part is None else part[rows, queries] for part in (self.mask, self.bias))
        start = keys.start - self.tiling.before
        return Visibility(
            position=unspecialized(queries.start + structure.keys - structure.queries),
            start=unspecialized(start),
            behind=window - 1,
            ahead=0 if structure.is_causal else window - 1,
            step=self.tiling.step,
            real_queries=unspecialized(structure.queries - queries.start),
            real_keys=unspecialized(structure.keys),
            first_real_key=0 if start < 0 else None,
            groups=self.groups,
            **_strided("mask", mask),
            **_strided("bias", bias),
            first_keys=None if self.first_keys is None else self.first_keys[rows, queries],
            row_of_first_keys=self.queries,
        )

    def _masks(self, mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """What hides and what biases, `[rows of the batch, T, S]`."""
        shape = (self.batch // self.groups, self.structure.queries, self.structure.keys)
        visible, bias = (None if part is None else part[:, 0].expand(shape) for part in split_mask(mask))
        return None if visible is None else visible.view(torch.uint8), bias


def _strided(name: str, part: Tensor | None) -> dict[str, Any]:
    """A part of a mask `[rows of the batch, c, S]` and its strides, as `Visibility` has them."""
    strides = (0, 0, 0) if part is None else part.stride()
    return {name: part, **dict(zip((f"{name}_of_{axis}" for axis in ("row", "query", "key")), strides, strict=True))}


def padded(rows: Tensor, axis: int, length: int, before: int = 0) -> Tensor:
    """Returns `rows` with zeros before and after an axis, so that it has this length; as they are if it has."""
    after = length - before - rows.shape[axis]
    return F.pad(rows, (0, 0) * (rows.ndim - 1 - axis) + (before, after)) if before or after else rows
