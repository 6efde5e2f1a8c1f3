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

from .dcmha_triton_arguments import Chunk, MapInputs, MapSettings, Sizes, Visibility
from .dcmha_triton_choice import fewest_rows, fits_in_a_chunk, items_of_a_chunk, tile_of_merge
from .masking import Structure, split_mask

# The keys of a block are a multiple of this.
ALIGNMENT = 16


class Workspace:
    """The inputs as kernels and matrix products take them, and `maps` buffers that all chunks share.

    Args:
        patch: queries and keys that lengths are multiples of.
    """

    def __init__(self, inputs: MapInputs, settings: MapSettings, maps: tuple[str, ...], patch: tuple[int, int]) -> None:
        self.batch, self.heads, queries, _ = inputs.query.shape
        self.kv_heads, keys = inputs.key.shape[1:3]
        self.kernels = load_kernels(inputs.query.device)
        self.structure = Structure(queries, keys, settings.is_causal, settings.sliding_window)
        self.scaling, self.groups, self.patch = settings.scaling, settings.groups, patch
        self.queries, self.keys = map(aligned, (queries, keys), patch)
        self.query = padded(inputs.query, 2, self.queries)
        self.key, self.value = (
            padded(rows, 2, self.keys).contiguous().flatten(0, 1) for rows in (inputs.key, inputs.value)
        )
        dtype = torch.float32 if self.query.dtype == torch.float32 else torch.float16
        self.score_query, self.score_key = self.query.to(dtype), self.key.to(dtype)
        self.mask, self.bias = self._masks(inputs.mask)
        rows_of_chunk = self._rows_of_chunk()
        self.spans = self._spans(rows_of_chunk, inputs.first_keys)
        self.first_keys = None
        if inputs.first_keys is not None:
            first_keys = inputs.first_keys.to(self.query.device, torch.int32)
            self.first_keys = padded(first_keys, 1, self.queries).contiguous()
        widest = max((keys.stop - keys.start for _, keys in self.spans), default=0)
        item = self.heads * min(rows_of_chunk, self.queries) * widest
        rows = max(1, min(self.batch // self.groups, items_of_a_chunk(item * self.groups)))
        self.items = rows * self.groups
        self.memory = dict(zip(maps, self.query.new_empty(len(maps), self.items * item), strict=True))

    def chunks(self) -> Iterator[Chunk]:
        """Yields all chunks but those whose queries see no key."""
        for queries, keys in self.spans:
            for first in range(0, self.batch, self.items):
                items = slice(first, min(first + self.items, self.batch))
                counts = items.stop - first, queries.stop - queries.start, keys.stop - keys.start
                sizes = Sizes(*counts[1:], self.queries, self.keys)
                where = self._visibility(slice(items.start // self.groups, None), queries, keys)
                yield Chunk(items, queries, keys, counts, sizes, where)

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

    def merge(self, chunk: Chunk, partial_lse: Tensor, lse: Tensor) -> None:
        """Sets the log-sum-exp of whole rows, `[items, H, c of T]`, from that of their patches."""
        items, queries, _ = chunk.counts
        block_t, warps = tile_of_merge()
        self.kernels["dcmha_merge"][-(-queries // block_t), self.heads, items](
            partial_lse,
            lse,
            loop_bound(partial_lse.shape[1]),
            queries,
            self.queries,
            block_t=block_t,
            num_warps=warps,
        )

    def partial_of_queries(self, chunk: Chunk, block: int) -> Tensor:
        """Room for a number of each head and query from each block of keys: `[items, blocks, H, c]`."""
        items, queries, keys = chunk.counts
        return self.query.new_empty(items, -(-keys // block), self.heads, queries, dtype=torch.float32)

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
            **_strided("mask", mask),
            **_strided("bias", bias),
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
        queries, rows = self.structure.queries, aligned(fewest_rows(), self.patch[0])
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


def _strided(name: str, part: Tensor | None) -> dict[str, Any]:
    """A part of a mask `[rows of the batch, c, n]` and its strides, as `Visibility` has them."""
    strides = (0, 0, 0) if part is None else part.stride()
    return {name: part, **dict(zip((f"{name}_of_{axis}" for axis in ("row", "query", "key")), strides, strict=True))}


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
    from .dcmha_triton_matrix_kernels import MATRIX_KERNELS

    return KERNELS | MATRIX_KERNELS | DECODE_KERNELS


def loop_bound(count: int) -> Any:
    """`count` as an argument that kernels loop up to: Triton's interpreter needs it as a constant."""
    from .dcmha_triton_tiles import INTERPRETED, tl

    return tl.constexpr(count) if INTERPRETED else count


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
