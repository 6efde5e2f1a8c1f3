"""Composition on the tensor cores (`kernels.tensor_cores`): a matrix for each query, and the terms of each key.

Before the other kernels run, the queries' terms of a stage become matrices (`matrices.py`). The backward kernels write
partial sums of the gradients of terms, not of matrices; those of keys' terms are added up over the chunks. `DESIGN.md`,
"On the tensor cores", has the reasons.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from ..arguments import ColumnTables, MapChunk, MapInputs, Mixing, TermGradients, unspecialized
from ..distance_columns import DistanceColumns
from ..matrices import count_terms, key_counts, make_mixing, padded_terms
from ..tuning import filled_up, matrix_tiles_for, turns_of_rows, turns_of_window
from ..workspace import Workspace
from .interface import KernelComposer


class TensorCoreComposer(KernelComposer):
    """Composes up to 32 heads of an item; a static matrix is part of the queries' matrices."""

    @staticmethod
    def patch_of(inputs: MapInputs) -> tuple[int, int]:
        tiles = matrix_tiles_for(filled_up(inputs.query.shape[1]))
        queries, keys, *_ = map(max, zip(*tiles.values(), strict=True))
        return queries, keys

    @staticmethod
    def maps(inputs: MapInputs, *, backward: bool) -> list[str]:
        return []

    def __init__(self, work: Workspace, inputs: MapInputs, tables: DistanceColumns, *, backward: bool) -> None:
        self.work, self.tables, self.padded = work, tables, filled_up(work.heads)
        self.tiles = matrix_tiles_for(self.padded)
        self.terms = padded_terms(work, inputs)
        self.statics = {"pre": inputs.pre_static, "post": inputs.post_static}
        self.mixing = make_mixing(work, inputs, self.terms)
        self.sums = self._sums() if backward else {}

    def probs(self, chunk: MapChunk, scores: Tensor, lse: Tensor) -> Tensor:
        """Composes maps `[items, H, c, n]` in two kernels: one for the log-sum-exp, one for the probabilities."""
        probs = self.work.map("scores", chunk)
        partial_lse = self.work.partial_of_queries(chunk, self.tiles["dcmha_matrix_statistics"][1])
        tables = self.tables.of_chunk(chunk)
        self._launch("dcmha_matrix_statistics", chunk, tables, scores, partial_lse)
        self.work.merge(chunk, partial_lse, lse)
        self._launch("dcmha_matrix_probs", chunk, tables, scores, probs, lse)
        return probs

    def backward_post(
        self, chunk: MapChunk, scores: Tensor, grad_composed: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns maps `[items, H, c, n]`; the gradients of probabilities overwrite `grad_composed`."""
        name, probs = "dcmha_matrix_backward_post", self.work.map("result", chunk)
        partial_delta = self.work.partial_of_queries(chunk, self.tiles[name][1])
        tables = self.tables.of_chunk(chunk, "probs")
        self._launch_backward(name, "post", chunk, tables, scores, grad_composed, probs, partial_delta, lse=lse)
        torch.sum(partial_delta, dim=1, out=delta)
        return probs, grad_composed

    def backward_pre(self, chunk: MapChunk, scores: Tensor, grad_probs: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
        """Returns the gradients of the scores, `[items, H, c, n]`."""
        name, grads = "dcmha_matrix_backward_pre", self.work.map("result", chunk)
        tables = self.tables.of_chunk(chunk, "composed_scores")
        self._launch_backward(name, "pre", chunk, tables, scores, grad_probs, grads, delta, lse=lse)
        return grads

    def gradients(self) -> dict[str, Tensor]:
        """Returns `[B, T or S, terms, H]` without padding, and static matrices `[H, H]`."""
        totals = {name: total.sum(1) if "key" in name else total for name, total in self.sums.items()}
        return {
            name: total if "static" in name else self.work.without_padding(total, of_keys="key" in name)
            for name, total in totals.items()
        }

    def _sums(self) -> dict[str, Tensor]:
        """Zeros for the gradients of terms and of static matrices.

        They are `[B, length, terms, H]` for queries, `[B, slots, length, terms, H]` for keys and `[H, H]` for matrices.
        """
        shapes = {f"{stage}_static": static.shape for stage, static in self.statics.items() if static is not None}
        for name, terms in self.terms.items():
            if terms is not None:
                batch, *others = terms.shape
                slots = (self._slots(f"dcmha_matrix_backward_{name.split('_')[0]}"),) if "key" in name else ()
                shapes[name] = torch.Size((batch, *slots, *others))
        return {
            name: torch.zeros(shape, dtype=torch.float32, device=self.work.device) for name, shape in shapes.items()
        }

    def _launch(self, name: str, chunk: MapChunk, tables: ColumnTables, *arguments: Any, **constants: int) -> None:
        """Launches a kernel on all patches of a chunk, with its own arguments and those that all kernels have."""
        block_t, block_s, warps, stages = self.tiles[name]
        sides = zip(self.mixing, (chunk.queries, chunk.keys, chunk.queries, chunk.keys), strict=True)
        mixing = Mixing(*(_of_chunk(part, chunk.items, positions) for part, positions in sides))
        self.work.kernels[name][self._grid(name, chunk)](
            *arguments,
            mixing,
            chunk.sizes,
            chunk.where,
            tables,
            heads=self.work.heads,
            padded=self.padded,
            block_t=block_t,
            block_s=block_s,
            turns=self._turns(name),
            key_counts=key_counts(mixing),
            **constants,
            num_warps=warps,
            num_stages=stages,
        )

    def _grid(self, name: str, chunk: MapChunk) -> tuple[int, int, int]:
        """Returns the number of programs along the keys, the number along the queries, and the number of items."""
        items, queries, keys = chunk.counts
        block_t, block_s, *_ = self.tiles[name]
        return keys // block_s, -(-queries // (block_t * self._turns(name))), items

    def _turns(self, name: str) -> int:
        """The number of turns of a program, whose queries are all in one block of a window."""
        step = self.work.tiling.step
        return turns_of_rows() if step is None else turns_of_window(step // self.tiles[name][0])

    def _slots(self, name: str) -> int:
        """How many programs may add to the gradients of the same key at once."""
        return self.work.tiling.slots(self.tiles[name][0] * self._turns(name))

    def _launch_backward(
        self, name: str, stage: str, chunk: MapChunk, tables: ColumnTables, *maps: Tensor, lse: Tensor
    ) -> None:
        """Launches a kernel on maps `[items, H, c, n]`, and adds its partial gradients to those of the stage.

        The kernel itself adds those of keys' terms.
        """
        terms = _of_chunk(self.terms[f"{stage}_query"], chunk.items, chunk.queries)
        partial = self._partial(name, stage, chunk)
        self._launch(name, chunk, tables, *maps, partial, terms, lse, query_count=count_terms(terms))
        if partial.query is not None:
            torch.sum(
                partial.query, 1, dtype=torch.float32, out=self.sums[f"{stage}_query"][chunk.items, chunk.queries]
            )
        if partial.static is not None:
            heads = self.work.heads
            self.sums[f"{stage}_static"] += partial.static.sum((0, 1, 2))[:heads, :heads].t()

    def _partial(self, name: str, stage: str, chunk: MapChunk) -> TermGradients:
        """What the programs of a kernel write or add to, in the shapes of `TermGradients`.

        The parts of queries, of which every patch has one, are bfloat16 if the maps are, to save memory.
        """
        query, key = self.terms[f"{stage}_query"], self.terms[f"{stage}_key"]
        blocks, programs, items = self._grid(name, chunk)
        square = self.padded, self.padded
        dtype = torch.bfloat16 if self.work.dtype == torch.bfloat16 else torch.float32
        new = functools.partial(torch.empty, device=self.work.device)
        return TermGradients(
            None if query is None else new(items, blocks, chunk.sizes.queries, *query.shape[2:], dtype=dtype),
            None if key is None else self.sums[f"{stage}_key"][chunk.items, :, chunk.keys],
            None if self.statics[stage] is None else new(items, programs, blocks, *square, dtype=torch.float32),
            unspecialized(self._slots(name)),
        )


def _of_chunk(terms: Tensor | None, items: slice, positions: slice) -> Tensor | None:
    """A chunk's part of `[B, length, ..]`; None stays None."""
    return None if terms is None else terms[items, positions]
