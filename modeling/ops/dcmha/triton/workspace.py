"""The chunks of a call, one after the other, and memory for the maps of one.

A chunk's scores, probabilities and their gradients are maps `[items, H, c, n]` over some items of the batch, `c`
queries and `n` keys. All chunks share their memory, so that it does not grow with the number of pairs.

Scores are float32 for inputs of that dtype, and float16 for half precision, so their magnitude has to stay below
65504 even where they are hidden. Composed probabilities and gradients have the dtype of the inputs; sums over several
chunks are float32. `DESIGN.md`, "Precision", has the reasons.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...masking import Structure, split_mask
from .arguments import MapChunk, MapInputs, MapSettings, Sizes, Visibility, unspecialized
from .kernels.registry import load_kernels
from .tiling import MOST_PROGRAMS, add_blocks, choose_tiling
from .tuning import items_of_a_chunk, tile_of_merge

# In place of a window where there is none: farther apart than any two positions.
UNBOUNDED = 1 << 30


class Workspace:
    """The chunks, and buffers of one chunk's maps that all of them share.

    Args:
        inputs: the op's tensors.
        settings: the op's other arguments.
        maps: the names of the buffers.
        patch: the sides of a patch, of which a chunk's numbers of queries and of keys are multiples.
    """

    def __init__(self, inputs: MapInputs, settings: MapSettings, maps: Sequence[str], patch: tuple[int, int]) -> None:
        self.batch, self.heads, _, _ = inputs.query.shape
        self.kernels = load_kernels(inputs.query.device)
        self.structure = Structure.of_call(
            inputs.query, inputs.key, inputs.offset, settings.is_causal, settings.sliding_window
        )
        self.scaling, self.groups = settings.scaling, settings.groups
        self.dtype, self.device = inputs.value.dtype, inputs.query.device
        self.score_dtype = torch.float32 if self.dtype == torch.float32 else torch.float16
        self.tiling = choose_tiling(inputs, self.structure, self.groups, patch)
        self.queries, self.keys = self.tiling.queries, self.tiling.keys
        self.mask, self.bias = self._masks(inputs.mask)
        self.first_keys = None
        if inputs.first_keys is not None:
            first_keys = inputs.first_keys.to(self.device, torch.int64).clamp(0, self.structure.keys).to(torch.int32)
            self.first_keys = padded(first_keys, 1, self.queries).contiguous()
        elements = self.heads * self.tiling.largest  # of an item's map
        most = min(items_of_a_chunk(elements * self.groups), MOST_PROGRAMS // self.groups)
        rows = max(1, min(self.batch // self.groups, most))
        self.items = rows * self.groups
        self.memory = dict(zip(maps, inputs.value.new_empty(len(maps), self.items * elements), strict=True))

    def chunks(self) -> Iterator[MapChunk]:
        """Yields all chunks whose queries see any key: for each span of queries, some items after the other."""
        for queries, keys in self.tiling.spans:
            sizes = Sizes(queries.stop - queries.start, self.tiling.columns(keys), self.queries, self.keys)
            for first in range(0, self.batch, self.items):
                items = slice(first, min(first + self.items, self.batch))
                where = self._visibility(slice(items.start // self.groups, None), queries, keys)
                yield MapChunk(items, queries, keys, sizes, where)

    def with_padding(self, rows: Tensor, *, of_keys: bool) -> Tensor:
        """Returns `[B, T or S, ..]` with zeros for the tiling's padding."""
        return padded(rows, 1, self.keys, self.tiling.before) if of_keys else padded(rows, 1, self.queries)

    def without_padding(self, rows: Tensor, *, of_keys: bool) -> Tensor:
        """The inverse of `with_padding`: a view `[B, T or S, ..]` of the real positions."""
        first, length = (self.tiling.before, self.structure.keys) if of_keys else (0, self.structure.queries)
        return rows.narrow(1, first, length)

    def add_keys(self, total: Tensor, partial: Tensor, chunk: MapChunk) -> None:
        """Adds partial sums for keys, `[items, programs along the queries, n, ..]`, to `total` `[B, all keys, ..]`."""
        step = chunk.where.step or chunk.sizes.queries
        parts = partial.unflatten(1, (chunk.sizes.queries // step, -1)).sum(2, dtype=torch.float32)
        add_blocks(total[chunk.items, chunk.keys], parts, step)

    def map(self, name: str, chunk: MapChunk, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the shared buffer `name` as maps `[items, H, c, n]`, by default in the dtype of the values."""
        items, queries, keys = chunk.counts
        shape = (items, self.heads, queries, keys)
        return self.memory[name][: items * self.heads * queries * keys].view(dtype or self.dtype).view(shape)

    def all_heads(self, maps: Tensor) -> Tensor:
        """Returns `[items, H, c, n]` as `[rows of the batch, heads of all groups, c, n]`."""
        return maps.view(-1, self.groups * self.heads, *maps.shape[2:])

    def mix(self, static: Tensor, maps: Tensor, base: Tensor, out: Tensor) -> Tensor:
        """Writes `out = base + static @ maps`, a product over heads of all groups.

        Maps are `[items, H, c, n]` and `static` is `[heads, heads]`, indexed [out, in].
        """
        maps, base, product = (self.all_heads(tensor).flatten(2) for tensor in (maps, base, out))
        torch.baddbmm(base, static.to(maps.dtype).expand(maps.shape[0], -1, -1), maps, out=product)
        return out

    def merge(self, chunk: MapChunk, partial_lse: Tensor, lse: Tensor) -> None:
        """Writes the log-sum-exp of whole rows to `lse` `[items, H, c of T]`, from that of blocks of their keys.

        The latter is `partial_lse` `[items, blocks, H, c]`.
        """
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
        """Allocates one element for each block of keys, head and query: `[items, blocks, H, c]`, float32."""
        items, queries, keys = chunk.counts
        shape = items, -(-keys // block), self.heads, queries
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def _visibility(self, rows: slice, queries: slice, keys: slice) -> Visibility:
        """Describes which keys are visible in a chunk of these rows of the batch, queries and keys."""
        structure = self.structure
        window = structure.sliding_window or UNBOUNDED
        mask, bias = (None if part is None else part[rows, queries] for part in (self.mask, self.bias))
        start = keys.start - self.tiling.before
        return Visibility(
            position=unspecialized(queries.start + structure.first_query),
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
        """Splits a four-dimensional mask into (8-bit visibility, bias), each `[rows of the batch, T, S]` or None."""
        shape = (self.batch // self.groups, self.structure.queries, self.structure.keys)
        visible, bias = (None if part is None else part[:, 0].expand(shape) for part in split_mask(mask))
        return None if visible is None else visible.view(torch.uint8), bias


def _strided(name: str, part: Tensor | None) -> dict[str, Any]:
    """The fields of `Visibility` for a part of a mask `[rows of the batch, c, S]` and its strides."""
    strides = (0, 0, 0) if part is None else part.stride()
    return {name: part, **dict(zip((f"{name}_of_{axis}" for axis in ("row", "query", "key")), strides, strict=True))}


def padded(rows: Tensor, axis: int, length: int, before: int = 0) -> Tensor:
    """Returns `rows` with `before` zeros in front and others behind, so that `axis` has this length; maybe no copy."""
    after = length - before - rows.shape[axis]
    return F.pad(rows, (0, 0) * (rows.ndim - 1 - axis) + (before, after)) if before or after else rows
