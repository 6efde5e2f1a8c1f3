"""What `dcmha_triton` works on: the inputs as kernels take them, and memory for one chunk after the other.

A chunk's scores, probabilities and their gradients are maps `[items, H, c, n]` over some items of the batch, `c`
queries and the `n` keys that they can reach. They live in memory that all chunks share, so that it does not grow with
the number of pairs.

Lengths are padded to whole patches, so that the kernels need no bounds. Padding is zero and adds nothing to gradients:
keys in it are hidden, and the gradients of the output of queries in it are zero.

Scores are kept in float32 for inputs of that dtype. For half precision they are kept in float16 even where inputs are
bfloat16: three more bits of the logits for the same traffic, at the price of a limit of 65504 on their magnitude, also
where they are hidden.
Composed probabilities and gradients have the dtype of the inputs; sums over several chunks are float32.
"""

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .dcmha_triton_arguments import Chunk, Factors, MapInputs, MapSettings, Sizes, Statics, Visibility
from .masking import Structure, split_mask

# Queries of a chunk, at least: more make better matrix products, fewer waste less on the triangle of hidden keys.
ROWS = 128
# Items of the batch share a chunk, and where all of them do it has more queries, while a map has no more elements than
# this: 128 MiB in half precision. Python and PyTorch need about 100 us to launch a chunk forward and 200 us backward,
# in which memory of 4.3 TB/s moves the 10 and 24 bytes per element of 40 million; under a causal mask the average chunk
# has half of what the largest has. Smaller maps would stay in the device's cache, at most 1.3 times as fast, and leave
# it waiting. Chosen on paper.
LARGEST_MAP = 1 << 26
# A causal window is cut into blocks of half as many queries as it has keys, but of at least this many. Chunks compute
# (c + W) / W of the pairs that are visible, and n / c copies of each key are made, about 3 at most. For 256 keys and 64
# channels 128 queries move the fewest bytes, 10 (c + W) + 8 D n / c for a query and a head; for wider windows chunks of
# `ROWS` queries of a block keep the first term low, and longer blocks the second. Chosen on paper.
BLOCK = 128
# The keys of a block are a multiple of this.
ALIGNMENT = 16
# Factors of as many positions lie side by side; as in `dcmha_triton_tiles`.
PANEL = 8
# Queries and keys of a program's patch, and its warps: 16 entries a thread, whose hidden maps (8 at rank 2) take half
# of the registers that it can have. Compiled for sm_90 and counted, not run: with 8 entries the kernels need 1.10,
# 1.12, 1.30 and 1.31 times the instructions, as what is loaded for a key or a query serves fewer of them, and registers
# leave room for no more entries on a multiprocessor: two programs of 16 (three of `dcmha_statistics`), or three to five
# of 8.
# The shape matters little (95 to 103 instructions in `dcmha_backward_post` from 32 x 32 to 8 x 256), so that it is one
# with little traffic of factors and partial sums. More than 5 rows on a side (rank 2 and a gate), or a static matrix in
# float32, leave registers for 8 entries.
TILES = dict.fromkeys(("dcmha_statistics", "dcmha_probs", "dcmha_backward_post", "dcmha_backward_pre"), (32, 64, 4))
TILES_OF_MANY_ROWS = dict.fromkeys(TILES, (16, 64, 4))
# Queries of a program of `dcmha_merge`, and its warps.
MERGED = (32, 4)


class Workspace:
    """The inputs as kernels and matrix products take them, and `maps` buffers that all chunks share."""

    def __init__(self, inputs: MapInputs, settings: MapSettings, maps: tuple[str, ...]) -> None:
        self.batch, self.heads, queries, _ = inputs.query.shape
        self.kv_heads, keys = inputs.key.shape[1:3]
        self.kernels = load_kernels(inputs.query.device)
        self.structure = Structure(queries, keys, settings.is_causal, settings.sliding_window)
        self.scaling, self.groups = settings.scaling, settings.groups
        self.rows = tuple(0 if rows is None else rows.shape[2] for rows in inputs.rows)
        has_static = inputs.pre_static is not None or inputs.post_static is not None
        self.tiles = tiles_for(self.rows, wide_static=has_static and inputs.query.dtype == torch.float32)
        self.patch = tuple(map(max, zip(*(tile[:2] for tile in self.tiles.values()), strict=True)))
        self.queries, self.keys = map(aligned, (queries, keys), self.patch)
        self.query = padded(inputs.query, 2, self.queries)
        self.key, self.value = (
            padded(rows, 2, self.keys).contiguous().flatten(0, 1) for rows in (inputs.key, inputs.value)
        )
        dtype = torch.float32 if self.query.dtype == torch.float32 else torch.float16
        self.score_query, self.score_key = self.query.to(dtype), self.key.to(dtype)
        self.factors = Factors(*map(as_panels, inputs.rows, (self.queries, self.keys) * 2))
        self.mask, self.bias = self._masks(inputs.mask)
        rows_of_chunk = self._rows_of_chunk()
        self.spans = self._spans(rows_of_chunk, inputs.first_keys)
        self.first_keys = None
        if inputs.first_keys is not None:
            first_keys = inputs.first_keys.to(self.query.device, torch.int32)
            self.first_keys = padded(first_keys, 1, self.queries).contiguous()
        widest = max((keys.stop - keys.start for _, keys in self.spans), default=0)
        item = self.heads * min(rows_of_chunk, self.queries) * widest
        rows = max(1, min(self.batch // self.groups, LARGEST_MAP // max(1, item * self.groups)))
        self.items = rows * self.groups
        self.memory = dict(zip(maps, self.query.new_empty(len(maps), self.items * item), strict=True))

    def chunks(self) -> Iterator[Chunk]:
        """Yields all chunks but those whose queries see no key."""
        for queries, keys in self.spans:
            for first in range(0, self.batch, self.items):
                items = slice(first, min(first + self.items, self.batch))
                counts = items.stop - first, queries.stop - queries.start, keys.stop - keys.start
                yield Chunk(items, queries, keys, counts, self._arguments(items, queries, keys))

    def map(self, name: str, chunk: Chunk, dtype: torch.dtype | None = None) -> Tensor:
        """Returns one of the shared buffers as `[items, H, c, n]`; in the dtype of the values if in no other."""
        items, queries, keys = chunk.counts
        shape = (items, self.heads, queries, keys)
        return self.memory[name][: items * self.heads * queries * keys].view(dtype or self.value.dtype).view(shape)

    def all_heads(self, maps: Tensor) -> Tensor:
        """`[items, H, c, n]` to `[rows of the batch, heads of all groups, c, n]`."""
        return maps.view(-1, self.groups * self.heads, *maps.shape[2:])

    def mix(self, static: Tensor, maps: Tensor, base: Tensor, out: Tensor) -> Tensor:
        """`out = base` plus what `static`, indexed [out, in], makes of `maps`."""
        maps, base, product = (self.all_heads(tensor).flatten(2) for tensor in (maps, base, out))
        torch.baddbmm(base, static.to(maps.dtype).expand(maps.shape[0], -1, -1), maps, out=product)
        return out

    def grouped(self, rows: Tensor) -> Tensor:
        """`[items, H, c, D or n]` to what a product with keys takes, `[items * H_kv, H / H_kv * c, D or n]`."""
        return rows.reshape(rows.shape[0] * self.kv_heads, -1, rows.shape[-1])

    def of_queries(self, rows: Tensor, chunk: Chunk) -> Tensor:
        """`[B, H, T, D]` to `grouped` rows of the chunk's queries."""
        return self.grouped(rows[chunk.items, :, chunk.queries])

    def of_keys(self, rows: Tensor, chunk: Chunk) -> Tensor:
        """`[B * H_kv, S, D]` to `[items * H_kv, n, D]`, a view."""
        return rows[chunk.items.start * self.kv_heads : chunk.items.stop * self.kv_heads, chunk.keys]

    def scores(self, chunk: Chunk) -> Tensor:
        """Leaves the scaled scores in a buffer."""
        scores = self.map("scores", chunk, self.score_key.dtype)
        query, key = self.of_queries(self.score_query, chunk), self.of_keys(self.score_key, chunk)
        multiply(query, key.transpose(1, 2), out=self.grouped(scores), scaling=self.scaling)
        return scores

    def launch(self, name: str, chunk: Chunk, statics: Statics, *tensors: Tensor | None) -> None:
        """Runs a kernel on all patches of a chunk."""
        block_t, block_s, warps = self.tiles[name]
        self.kernels[name][self.grid(name, chunk)](
            *tensors,
            *chunk.arguments,
            statics,
            heads=self.heads,
            rows=self.rows,
            block_t=block_t,
            block_s=block_s,
            num_warps=warps,
        )

    def merge(self, chunk: Chunk, partial_lse: Tensor, lse: Tensor) -> None:
        """Sets the log-sum-exp of whole rows, `[items, H, c of T]`, from that of their patches."""
        from .dcmha_triton_tiles import loop_bound

        items, queries, _ = chunk.counts
        block_t, warps = MERGED
        self.kernels["dcmha_merge"][-(-queries // block_t), self.heads, items](
            partial_lse,
            lse,
            loop_bound(partial_lse.shape[1]),
            queries,
            self.queries,
            block_t=block_t,
            num_warps=warps,
        )

    def grid(self, name: str, chunk: Chunk) -> tuple[int, int, int]:
        """Returns the number of patches along the keys, along the queries, and of items."""
        items, queries, keys = chunk.counts
        block_t, block_s, _ = self.tiles[name]
        return -(-keys // block_s), -(-queries // block_t), items

    def partial_of_queries(self, name: str, chunk: Chunk) -> Tensor:
        """Room for a number of each head and query from each block of keys: `[items, blocks, H, c]`."""
        blocks, _, items = self.grid(name, chunk)
        return self.query.new_empty(items, blocks, self.heads, chunk.counts[1], dtype=torch.float32)

    def _arguments(self, items: slice, queries: slice, keys: slice) -> tuple[Factors, Sizes, Visibility]:
        cut = zip(self.factors, (queries, keys, queries, keys), strict=True)
        factors = Factors(*(None if rows is None else panels_of(rows, side)[items] for rows, side in cut))
        lengths = (queries.stop - queries.start, keys.stop - keys.start)
        sizes = Sizes(*lengths, self.queries, self.keys)
        return factors, sizes, self._visibility(slice(items.start // self.groups, None), queries, keys)

    def _visibility(self, rows: slice, queries: slice, keys: slice) -> Visibility:
        structure = self.structure
        window = structure.sliding_window or structure.queries + structure.keys
        mask, bias = (None if part is None else part[rows, queries, keys] for part in (self.mask, self.bias))
        return Visibility(
            distance=queries.start + structure.keys - structure.queries - keys.start,
            behind=window - 1,
            ahead=0 if structure.is_causal else window - 1,
            real_queries=structure.queries - queries.start,
            real_keys=structure.keys - keys.start,
            groups=self.groups,
            mask=mask,
            mask_strides=(0, 0, 0) if mask is None else mask.stride(),
            bias=bias,
            bias_strides=(0, 0, 0) if bias is None else bias.stride(),
            first_keys=None if self.first_keys is None else self.first_keys[rows, queries],
            row_of_first_keys=self.queries,
            start=keys.start,
        )

    def _masks(self, mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """What hides and what biases, `[rows of the batch, T, S]`."""
        shape = (self.batch // self.groups, self.structure.queries, self.structure.keys)
        visible, bias = (None if part is None else part[:, 0].expand(shape) for part in split_mask(mask))
        return None if visible is None else visible.view(torch.uint8), bias

    def _rows_of_chunk(self) -> int:
        """How many queries a chunk has."""
        queries, rows = self.structure.queries, aligned(ROWS, self.patch[0])
        while rows < queries:
            keys = self.structure.reach(slice(max(0, queries - 2 * rows), queries))
            if not fits_in_a_chunk(self.batch * self.heads * 2 * rows * (keys.stop - keys.start)):
                break
            rows *= 2
        return rows

    def _spans(self, rows: int, first_keys: Tensor | None) -> list[tuple[slice, slice]]:
        """The queries and the keys of all chunks, whole patches of both.

        First keys shorten them where they are known without waiting for a device.
        """
        spans = []
        known = first_keys if first_keys is not None and first_keys.device.type == "cpu" else None
        for start in range(0, self.structure.queries, rows):
            real = slice(start, min(start + rows, self.structure.queries))
            keys = self.structure.reach(real)
            first = keys.start if known is None else max(keys.start, int(known[:, real].min()))
            if first < keys.stop:
                block = self.patch[1]
                queries = slice(start, min(start + rows, self.queries))
                spans.append((queries, slice(first // block * block, aligned(keys.stop, block))))
        return spans


def load_kernels(device: torch.device) -> dict[str, Any]:
    """Returns the kernels by name; their modules are not imported before they are needed.

    Raises:
        ImportError: Triton is not installed.
        ValueError: Triton does not run on `device`.
    """
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"implementation='triton' runs on CUDA devices, not on {device.type!r}; use 'chunked'")
    from .dcmha_triton_decode_kernels import DECODE_KERNELS
    from .dcmha_triton_kernels import KERNELS

    return KERNELS | DECODE_KERNELS


def fits_in_a_chunk(elements: int) -> bool:
    """Whether a chunk may have maps of so many elements."""
    return elements <= LARGEST_MAP


def block_of(window: int) -> int:
    """Returns how many queries of a causal window are a block."""
    return max(BLOCK, window // 2)


def tiles_for(rows: tuple[int, ...], *, wide_static: bool) -> dict[str, tuple[int, int, int]]:
    """Returns the patch and the warps of each kernel.

    Args:
        rows: the number of packed rows on each side of each stage.
        wide_static: whether a static matrix adds tiles of float32 to those that a thread holds.
    """
    return TILES_OF_MANY_ROWS if max(rows) > 5 or wide_static else TILES


def multiply(left: Tensor, right: Tensor, *, out: Tensor, scaling: float = 1.0) -> None:
    """`out = left @ right * scaling`, scaled before it is rounded."""
    torch.baddbmm(out, left, right, beta=0, alpha=scaling, out=out)


def aligned(length: int, multiple: int | None = None) -> int:
    """Returns the next multiple, of `ALIGNMENT` if of nothing else."""
    multiple = multiple or ALIGNMENT
    return -(-length // multiple) * multiple


def padded(rows: Tensor, axis: int, length: int) -> Tensor:
    """Returns `rows` with zeros after the end of an axis, so that it has this length; as they are if it has."""
    missing = length - rows.shape[axis]
    return F.pad(rows, (0, 0) * (rows.ndim - 1 - axis) + (0, missing)) if missing else rows


def as_panels(rows: Tensor | None, length: int) -> Tensor | None:
    """`[B, T or S, rows, H]` to panels `[B, H, length / PANEL, rows, PANEL]` in the float32 that kernels compute in.

    Each number is read for many keys or queries, and a conversion would cost as much as what is done with it. All rows
    of a panel lie at fixed distances, so that a kernel keeps one address for a side.
    """
    if rows is None:
        return None
    panels = padded(rows, 1, length).unflatten(1, (-1, PANEL)).permute(0, 4, 1, 3, 2)
    return panels.to(torch.float32, memory_format=torch.contiguous_format).contiguous()


def panels_of(rows: Tensor, positions: slice) -> Tensor:
    """The panels of these positions, which start and stop at one."""
    return rows[:, :, positions.start // PANEL : positions.stop // PANEL]
