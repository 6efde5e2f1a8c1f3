"""Composition on the tensor cores (`dcmha_triton_matrix_kernels`): a matrix for each query and one for each key.

All terms of a stage become matrices before the kernels, and the gradients of matrices become those of the terms after
them, both in work and memory that grow with the number of tokens.
"""

import math

import torch
from torch import Tensor

from .dcmha_triton_arguments import Chunk, Factors, MapInputs, Matrices
from .dcmha_triton_choice import matrix_tiles_for, most_turns, tile_of_matrices
from .dcmha_triton_composer import Composer
from .dcmha_triton_workspace import Workspace, loop_bound


class MatrixComposer(Composer):
    """Up to 32 heads of an item; a static matrix is part of the queries' matrices."""

    @staticmethod
    def patch_of(inputs: MapInputs) -> tuple[int, int]:
        tiles = matrix_tiles_for(_filled_up(inputs.query.shape[1])).values()
        queries, keys, *_ = map(max, zip(*tiles, strict=True))
        return queries, keys

    @staticmethod
    def maps(inputs: MapInputs, *, backward: bool) -> list[str]:
        return []

    def __init__(self, work: Workspace, inputs: MapInputs, *, backward: bool) -> None:
        self.work, self.padded = work, _filled_up(work.heads)
        self.tiles = matrix_tiles_for(self.padded)
        named = zip(Factors._fields, inputs.rows, strict=True)
        self.rows = {name: rows.contiguous() for name, rows in named if rows is not None}
        statics = {"pre_static": inputs.pre_static, "post_static": inputs.post_static}
        self.statics = {name: static for name, static in statics.items() if static is not None}
        self.matrices = Matrices(*self._matrices("pre"), *self._matrices("post"))
        summed = self.rows | self.statics if backward else {}
        self.sums = {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in summed.items()}

    def probs(self, chunk: Chunk, scores: Tensor, lse: Tensor) -> Tensor:
        probs = self.work.map("scores", chunk)
        partial_lse = self.work.partial_of_queries(chunk, self.tiles["dcmha_matrix_statistics"][1])
        self._launch("dcmha_matrix_statistics", chunk, scores, partial_lse)
        self.work.merge(chunk, partial_lse, lse)
        self._launch("dcmha_matrix_probs", chunk, scores, probs, lse)
        return probs

    def backward_post(
        self, chunk: Chunk, scores: Tensor, grad_composed: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor]:
        name, probs = "dcmha_matrix_backward_post", self.work.map("result", chunk)
        partial_delta = self.work.partial_of_queries(chunk, self.tiles[name][1])
        partial = self._partial(name, chunk, "post")
        self._launch(name, chunk, scores, grad_composed, probs, partial_delta, *partial, lse)
        torch.sum(partial_delta, dim=1, out=delta)
        self._add(chunk, "post", *partial)
        return probs, grad_composed

    def backward_pre(self, chunk: Chunk, scores: Tensor, grad_probs: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
        name, grads = "dcmha_matrix_backward_pre", self.work.map("result", chunk)
        partial = self._partial(name, chunk, "pre")
        self._launch(name, chunk, scores, grad_probs, grads, delta, *partial, lse)
        self._add(chunk, "pre", *partial)
        return grads

    def gradients(self) -> dict[str, Tensor]:
        return self.sums

    def _matrices(self, stage: str) -> tuple[Tensor | None, Tensor | None]:
        """A stage's matrices of all queries and of all keys; the first of them that is there has what is constant."""
        static, query, key = (f"{stage}_{part}" for part in ("static", "query", "key"))
        constant = torch.eye(self.work.heads, device=self.work.query.device)
        of_queries = of_keys = None
        if static in self.statics:
            constant += self.statics[static].t()
        if query in self.rows or static in self.statics:
            of_queries = self._side(query, constant, self.work.queries)
        if key in self.rows:
            of_keys = self._side(key, constant if of_queries is None else None, self.work.keys)
        return of_queries, of_keys

    def _side(self, name: str, constant: Tensor | None, length: int) -> Tensor:
        """`[B, length, padded, padded]`, in the dtype of the scores."""
        work, rows = self.work, self.rows.get(name)
        matrices = work.score_key.new_empty(work.batch, length, self.padded, self.padded)
        block, warps = tile_of_matrices()
        work.kernels["dcmha_matrices"][length // block, work.batch](
            matrices,
            rows,
            constant,
            0 if rows is None else rows.shape[1],
            length,
            heads=work.heads,
            padded=self.padded,
            count=0 if rows is None else rows.shape[2],
            block=block,
            num_warps=warps,
        )
        return matrices

    def _launch(self, name: str, chunk: Chunk, *tensors: Tensor | None) -> None:
        """Runs a kernel on all patches of a chunk."""
        block_t, block_s, warps, stages = self.tiles[name]
        sides = zip(self.matrices, (chunk.queries, chunk.keys, chunk.queries, chunk.keys), strict=True)
        matrices = Matrices(*(None if part is None else part[chunk.items, side] for part, side in sides))
        items, queries, keys = chunk.counts
        turns = self._turns(name, chunk)
        self.work.kernels[name][keys // block_s, queries // (block_t * turns), items](
            *tensors,
            matrices,
            chunk.sizes,
            chunk.where,
            heads=self.work.heads,
            padded=self.padded,
            block_t=block_t,
            block_s=block_s,
            turns=turns,
            num_warps=warps,
            num_stages=stages,
        )

    def _turns(self, name: str, chunk: Chunk) -> int:
        """How many blocks of queries a program goes through: as many as divide those of the chunk."""
        return math.gcd(chunk.counts[1] // self.tiles[name][0], most_turns())

    def _partial(self, name: str, chunk: Chunk, stage: str) -> list[Tensor | None]:
        """Room for what each program adds to the gradients of a stage's matrices of queries and of keys.

        Those of queries, of which there are as many as patches, are bfloat16 where the maps are.
        """
        block_t, block_s, *_ = self.tiles[name]
        items, queries, keys = chunk.counts
        of_queries, of_keys = (getattr(self.matrices, f"{stage}_{side}") for side in ("query", "key"))
        partial: list[Tensor | None] = [None, None]
        if of_queries is not None:
            dtype = torch.bfloat16 if self.work.value.dtype == torch.bfloat16 else torch.float32
            shape = (items, keys // block_s, queries, *of_queries.shape[2:])
            partial[0] = of_queries.new_empty(shape, dtype=dtype)
        if of_keys is not None:
            shape = (items, queries // (block_t * self._turns(name, chunk)), keys, *of_keys.shape[2:])
            partial[1] = of_keys.new_empty(shape, dtype=torch.float32)
        return partial

    def _add(self, chunk: Chunk, stage: str, of_queries: Tensor | None, of_keys: Tensor | None) -> None:
        """Adds what a chunk says about a stage."""
        for side, partial, positions in (("query", of_queries, chunk.queries), ("key", of_keys, chunk.keys)):
            if partial is not None and f"{stage}_{side}" in self.sums:
                self._add_rows(f"{stage}_{side}", partial, chunk.items, positions)
        if of_queries is not None and f"{stage}_static" in self.statics:
            heads = self.work.heads
            total = of_queries.sum((0, 1, 2), dtype=torch.float32)[:heads, :heads]
            self.sums[f"{stage}_static"] += total.t()

    def _add_rows(self, name: str, partial: Tensor, items: slice, positions: slice) -> None:
        """Adds to the gradients of packed rows what the partial sums of those of matrices make of them."""
        rows = self.rows[name]
        block, warps = tile_of_matrices()
        self.work.kernels["dcmha_matrix_rows"][partial.shape[2] // block, partial.shape[0]](
            self.sums[name][items, positions],
            rows[items, positions],
            partial,
            loop_bound(partial.shape[1]),
            partial.shape[2],
            rows.shape[1],
            rows.shape[1] - positions.start,
            heads=self.work.heads,
            padded=self.padded,
            count=rows.shape[2],
            block=block,
            num_warps=warps,
        )


def _filled_up(heads: int) -> int:
    return 16 if heads <= 16 else 32
