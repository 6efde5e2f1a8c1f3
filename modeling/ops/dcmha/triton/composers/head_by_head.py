"""Composition by kernels that go through the heads one after the other (`kernels.head_by_head`).

They take any number of heads and any dtype. `DESIGN.md`, "Head by head", has the reasons.
"""

import torch
from torch import Tensor

from ..arguments import PANEL, ColumnTables, Factors, MapChunk, MapInputs, Statics
from ..distance_columns import DistanceColumns
from ..tuning import tiles_for
from ..workspace import Workspace
from .interface import KernelComposer


class HeadByHeadComposer(KernelComposer):
    """Has terms in panels, and multiplies whole maps with static matrices, before or after a kernel."""

    @staticmethod
    def patch_of(inputs: MapInputs) -> tuple[int, int]:
        queries, keys = zip(*(tile[:2] for tile in _tiles(inputs).values()), strict=True)
        return max(queries), max(keys)

    @staticmethod
    def maps(inputs: MapInputs, *, backward: bool) -> list[str]:
        pre, post = inputs.pre_static is not None, inputs.post_static is not None
        needed = {"mixed_scores": pre, "mixed_grads": post and backward, "plain": post or (pre and backward)}
        return [name for name in needed if needed[name]]

    def __init__(self, work: Workspace, inputs: MapInputs, tables: DistanceColumns, *, backward: bool) -> None:
        self.work, self.tables = work, tables
        self.pre_static, self.post_static = inputs.pre_static, inputs.post_static
        self.term_counts, self.tiles = _term_counts(inputs), _tiles(inputs)
        named = zip(Factors._fields, inputs.terms, strict=True)
        self.factors = Factors(
            *(
                None if terms is None else _as_panels(work.with_padding(terms, of_keys="key" in name))
                for name, terms in named
            )
        )
        self.sums, self.statics = self._sums() if backward else ({}, {})

    def probs(self, chunk: MapChunk, scores: Tensor, lse: Tensor) -> Tensor:
        """Returns `[items, H, c, n]`. The static matrix of `pre` is applied before the kernels, `post`'s after them."""
        work, probs = self.work, self.work.map("scores", chunk)
        plain = None if self.post_static is None else work.map("plain", chunk)
        statics = Statics(self._mixed_scores(chunk, scores), plain=plain)
        partial_lse = work.partial_of_queries(chunk, self.tiles["dcmha_statistics"][1])
        tables = self.tables.of_chunk(chunk)
        self._launch("dcmha_statistics", chunk, statics, tables, scores, partial_lse)
        work.merge(chunk, partial_lse, lse)
        self._launch("dcmha_probs", chunk, statics, tables, scores, probs, lse)
        if self.post_static is not None and plain is not None:
            work.mix(self.post_static.t(), plain, probs, out=probs)
        return probs

    def backward_post(
        self, chunk: MapChunk, scores: Tensor, grad_composed: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns maps `[items, H, c, n]`.

        The gradients of probabilities overwrite `grad_composed`, or with a static matrix the map of its product.
        """
        work, static, name = self.work, self.post_static, "dcmha_backward_post"
        probs, plain = work.map("result", chunk), None if static is None else work.map("plain", chunk)
        statics = Statics(self._mixed_scores(chunk, scores), self._mixed_grads(chunk, grad_composed), plain)
        # They overwrite a map that no later kernel needs: with a static matrix `grad_composed` is needed once more.
        grad_probs = grad_composed if statics.grads is None else statics.grads
        sums, weights = (work.partial_of_queries(chunk, self.tiles[name][1]) for _ in range(2))
        written = probs.view(scores.dtype), probs, grad_probs, sums, weights
        partial = self._partial(name, chunk, "post")
        tables = self.tables.of_chunk(chunk, "probs")
        self._launch(name, chunk, statics, tables, scores, grad_composed, *written, *partial, lse)
        # Rows of which no key is visible have no weight, and no gradient.
        torch.div(sums.sum(1), weights.sum(1).clamp_(min=torch.finfo(torch.float32).tiny), out=delta)
        self._add_factors(chunk, "post", partial)
        if static is not None and plain is not None:
            work.mix(static.t(), plain, probs, out=probs)
            self._add_static("post", plain, grad_composed)
        return probs, grad_probs

    def backward_pre(self, chunk: MapChunk, scores: Tensor, grad_probs: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
        """Returns `[items, H, c, n]`. The static matrix is applied after the kernel."""
        work, static, name = self.work, self.pre_static, "dcmha_backward_pre"
        grads, plain = work.map("result", chunk), None if static is None else work.map("plain", chunk)
        # `backward_post` has filled this buffer.
        mixed = None if static is None else work.map("mixed_scores", chunk, scores.dtype)
        statics, tables = Statics(mixed, plain=plain), self.tables.of_chunk(chunk, "composed_scores")
        partial = self._partial(name, chunk, "pre")
        self._launch(name, chunk, statics, tables, scores, grad_probs, grads, delta, *partial, lse)
        self._add_factors(chunk, "pre", partial)
        if static is not None and plain is not None:
            work.mix(static, plain, grads, out=grads)
            self._add_static("pre", scores, plain)
        return grads

    def gradients(self) -> dict[str, Tensor]:
        """Returns `[B, T or S, terms, H]`, from sums that are kept as `[B, length, H, terms]`, and static matrices."""
        terms = {
            name: self.work.without_padding(total, of_keys="key" in name).transpose(2, 3)
            for name, total in self.sums.items()
        }
        if "pre_static" in self.statics:
            self.statics["pre_static"] += self.tables.static_gradient()
        return terms | self.statics

    def _sums(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Zeros for the gradients of terms, `[B, length, H, terms]`, and of static matrices, `[heads, heads]`."""
        sums = {
            name: terms.new_zeros(terms.shape[0], terms.shape[2] * terms.shape[4], terms.shape[1], terms.shape[3])
            for name, terms in self.factors._asdict().items()
            if terms is not None
        }
        statics = {"pre_static": self.pre_static, "post_static": self.post_static}
        return sums, {
            name: torch.zeros_like(static, dtype=torch.float32)
            for name, static in statics.items()
            if static is not None
        }

    def _launch(
        self, name: str, chunk: MapChunk, statics: Statics, tables: ColumnTables, *tensors: Tensor | None
    ) -> None:
        """Launches a kernel on all patches of a chunk, with its own tensors and the arguments that all kernels have."""
        block_t, block_s, warps = self.tiles[name]
        sides = zip(self.factors, (chunk.queries, chunk.keys, chunk.queries, chunk.keys), strict=True)
        factors = Factors(*(None if terms is None else _panels_of(terms, side)[chunk.items] for terms, side in sides))
        self.work.kernels[name][self._grid(name, chunk)](
            *tensors,
            factors,
            chunk.sizes,
            chunk.where,
            statics,
            tables,
            heads=self.work.heads,
            term_counts=self.term_counts,
            block_t=block_t,
            block_s=block_s,
            num_warps=warps,
        )

    def _grid(self, name: str, chunk: MapChunk) -> tuple[int, int, int]:
        """Returns the number of patches along the keys, the number along the queries, and the number of items."""
        items, queries, keys = chunk.counts
        block_t, block_s, _ = self.tiles[name]
        return -(-keys // block_s), -(-queries // block_t), items

    def _partial(self, name: str, chunk: MapChunk, stage: str) -> list[Tensor | None]:
        """Allocates what each patch adds to the gradients of a stage's terms, those of queries and those of keys.

        Both are `[items, patches along the queries, patches along the keys, H, terms, queries or keys of a patch]`.
        """
        patches = self._grid(name, chunk)[::-1]
        partial: list[Tensor | None] = []
        for side, block in zip(("query", "key"), self.tiles[name], strict=False):
            sums = self.sums.get(f"{stage}_{side}")
            partial.append(None if sums is None else sums.new_empty(*patches, *sums.shape[2:], block))
        return partial

    def _add_factors(self, chunk: MapChunk, stage: str, partial: list[Tensor | None]) -> None:
        """Adds the parts of all patches, which `_partial` allocated, to the gradients `[B, length, H, terms]`."""
        of_queries, of_keys = partial
        if of_queries is not None:
            parts = of_queries.sum(2).movedim(-1, 2).flatten(1, 2)
            self.sums[f"{stage}_query"][chunk.items, chunk.queries] += parts
        if of_keys is not None:
            self.work.add_keys(self.sums[f"{stage}_key"], of_keys.movedim(-1, 3).flatten(2, 3), chunk)

    def _add_static(self, stage: str, maps: Tensor, grads: Tensor) -> None:
        """Adds the static matrix's gradient from its input `maps` and its output's `grads`, both `[items, H, c, n]`.

        The sum over all pairs is a batch of many small products: one for each row of the batch if there are many rows,
        else one for each query.
        """
        maps, grads = self.work.all_heads(maps).to(grads.dtype), self.work.all_heads(grads)
        if 4 * maps.shape[0] >= maps.shape[2]:
            pairs = [(maps.flatten(2), grads.flatten(2))]
        else:
            pairs = list(zip(maps.transpose(1, 2), grads.transpose(1, 2), strict=True))
        for left, right in pairs:
            self.statics[f"{stage}_static"] += _product(left, right.transpose(1, 2)).sum(0)

    def _mixed_scores(self, chunk: MapChunk, scores: Tensor) -> Tensor | None:
        """Scores plus their product with the static matrix, `[items, H, c, n]`; None without one."""
        if self.pre_static is None:
            return None
        return self.work.mix(
            self.pre_static.t(), scores, scores, out=self.work.map("mixed_scores", chunk, scores.dtype)
        )

    def _mixed_grads(self, chunk: MapChunk, grads: Tensor) -> Tensor | None:
        """Gradients plus their product with the transposed static matrix, `[items, H, c, n]`; None without one."""
        if self.post_static is None:
            return None
        return self.work.mix(self.post_static, grads, grads, out=self.work.map("mixed_grads", chunk))


def _term_counts(inputs: MapInputs) -> tuple[int, ...]:
    """The number of terms on each side of each stage."""
    return tuple(0 if terms is None else terms.shape[2] for terms in inputs.terms)


def _tiles(inputs: MapInputs) -> dict[str, tuple[int, int, int]]:
    """The patch and the warps of each kernel."""
    has_static = inputs.pre_static is not None or inputs.post_static is not None
    is_wide = inputs.query.dtype == torch.float32 or inputs.composed_bias is not None
    has_gain = inputs.position_gain is not None
    return tiles_for(_term_counts(inputs), wide_static=has_static and is_wide, has_gain=has_gain)


def _as_panels(terms: Tensor) -> Tensor:
    """`[B, T or S, terms, H]` as panels `[B, H, length / PANEL, terms, PANEL]` in float32.

    Kernels compute in float32 and read each element for many keys or queries; converted here, it is not converted each
    time. The terms of a panel are at fixed distances, so that a kernel needs one address for a side.
    """
    panels = terms.unflatten(1, (-1, PANEL)).permute(0, 4, 1, 3, 2)
    return panels.to(torch.float32, memory_format=torch.contiguous_format).contiguous()


def _panels_of(terms: Tensor, positions: slice) -> Tensor:
    """The panels of these positions in `[B, H, panels, terms, PANEL]`; positions start and stop at a panel's start."""
    return terms[:, :, positions.start // PANEL : positions.stop // PANEL]


def _product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right`, `[b, i, k]` times `[b, k, j]`, in float32."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())
