"""The matrix products of `dcmha_triton` for causal windows, by the kernels of `kernels.window_matmuls`."""

import math
from typing import Any

import torch
from torch import Tensor

from .arguments import MapChunk, MapInputs
from .matmuls import Matmuls, row_strides, with_contiguous_rows
from .tiling import WindowTiling
from .tuning import tile_of_window
from .workspace import Workspace


class WindowMatmuls(Matmuls):
    """Products of window maps. Rows are read in place; gradients of keys are float32 if several chunks add to them."""

    def __init__(self, work: Workspace, inputs: MapInputs, grad_output: Tensor | None = None) -> None:
        assert isinstance(work.tiling, WindowTiling)
        self.work, self.tiling = work, work.tiling
        self.query, self.key, self.value = map(with_contiguous_rows, (inputs.query, inputs.key, inputs.value))
        block_t, block_s, self.warps = tile_of_window(work.dtype)
        # Sides that divide a block's queries and keys, so that both consist of whole tiles.
        self.tile = math.gcd(self.tiling.step, block_t), math.gcd(self.tiling.step, self.tiling.reach, block_s)
        self.share = work.heads // self.key.shape[1]
        self.is_added = len(self.tiling.spans) > 1
        if grad_output is None:
            batch, heads, queries, width = self.query.shape
            self.output = self.query.new_empty(batch, queries, heads, width)
        else:
            self.grad_output = with_contiguous_rows(grad_output.transpose(1, 2))
            self.grad_query = torch.empty_like(self.query)
            dtype = torch.float32 if self.is_added else work.dtype
            self.grad_key, self.grad_value = (
                torch.zeros(rows.shape, dtype=dtype, device=work.device) for rows in (self.key, self.value)
            )

    def scores(self, chunk: MapChunk) -> Tensor:
        """Returns `[items, H, c, n]` by one kernel."""
        scores = self.work.map("scores", chunk, self.work.score_dtype)
        return self._maps(chunk, self.query, self.key, scores, self.work.scaling)

    def attend(self, chunk: MapChunk, probs: Tensor) -> None:
        """Writes `[items, c, H, D]` of the output, from maps `[items, H, c, n]`."""
        self._queries(chunk, probs, self.value, self.output.transpose(1, 2), 1.0)

    def grad_composed(self, chunk: MapChunk) -> Tensor:
        """Returns `[items, H, c, n]` by one kernel."""
        return self._maps(chunk, self.grad_output, self.value, self.work.map("grad_composed", chunk), 1.0)

    def add_to_values(self, chunk: MapChunk, probs: Tensor) -> None:
        """Adds sums over the queries of maps `[items, H, c, n]`."""
        self._keys(chunk, probs, self.grad_output, self.grad_value, 1.0)

    def add_to_queries_and_keys(self, chunk: MapChunk, grads: Tensor) -> None:
        """Writes sums over the keys, and adds sums over the queries, of maps `[items, H, c, n]`."""
        self._queries(chunk, grads, self.key, self.grad_query, self.work.scaling)
        self._keys(chunk, grads, self.query, self.grad_key, self.work.scaling)

    def gradients(self) -> dict[str, Tensor]:
        """Returns `[B, H, T, D]` and twice `[B, H_kv, S, D]`."""
        return {"query": self.grad_query, "key": self.grad_key, "value": self.grad_value}

    def _maps(self, chunk: MapChunk, left: Tensor, right: Tensor, maps: Tensor, scaling: float) -> Tensor:
        """Writes maps `[items, H, c, n]`: products of the chunk's rows of `left` `[B, H, T, D]` and `right`.

        `right` is `[B, H_kv, S, D]`.
        """
        left, right = left[chunk.items, :, chunk.queries], right[chunk.items]
        block_t, block_s = self.tile
        items, queries, keys = chunk.counts
        grid = keys // block_s, queries // block_t, items * self.work.heads
        self._launch(
            "dcmha_window_maps", grid, chunk, left, right, maps, row_strides(left), row_strides(right), scaling
        )
        return maps

    def _queries(self, chunk: MapChunk, maps: Tensor, right: Tensor, rows: Tensor, scaling: float) -> None:
        """Writes the chunk's queries in `rows` `[B, H, T, D]`: sums over keys of maps times rows of `right`.

        Maps are `[items, H, c, n]` and `right` is `[B, H_kv, S, D]`.
        """
        right, rows = right[chunk.items], rows[chunk.items, :, chunk.queries]
        grid = chunk.counts[1] // self.tile[0], chunk.counts[0] * self.work.heads
        tensors = maps, right, rows, row_strides(right), row_strides(rows)
        self._launch("dcmha_window_queries", grid, chunk, *tensors, scaling, reach=self.tiling.reach)

    def _keys(self, chunk: MapChunk, maps: Tensor, left: Tensor, rows: Tensor, scaling: float) -> None:
        """Adds to the chunk's keys in `rows` `[B, H_kv, S, D]`: sums over queries of maps times rows of `left`.

        Maps are `[items, H, c, n]` and `left` is `[B, H, T, D]`.
        """
        left, rows = left[chunk.items, :, chunk.queries], rows[chunk.items]
        keys = chunk.keys.stop - chunk.keys.start
        grid = keys // self.tile[1], chunk.counts[0] * rows.shape[1]
        constants = {"step": self.tiling.step, "reach": self.tiling.reach, "is_added": self.is_added}
        tensors = maps, left, rows, row_strides(left), row_strides(rows)
        self._launch("dcmha_window_keys", grid, chunk, *tensors, scaling, **constants)

    def _launch(self, name: str, grid: tuple[int, ...], chunk: MapChunk, *arguments: Any, **constants: int) -> None:
        """Launches a kernel with its own arguments, the last of which is the scaling, and those that all have."""
        *tensors_and_strides, scaling = arguments
        block_t, block_s = self.tile
        self.work.kernels[name][grid](
            *tensors_and_strides,
            chunk.sizes,
            chunk.where,
            scaling,
            heads=self.work.heads,
            share=self.share,
            width=self.query.shape[3],
            **constants,
            block_t=block_t,
            block_s=block_s,
            num_warps=self.warps,
        )
