"""Tables by distance for the kernels of several queries: laid out as columns that need no bounds; and their gradients.

The gradient of a table's element is the sum of a map over all pairs at its distance. The sums are added up over chunks
in a fixed order. `DESIGN.md`, "Tables by distance", has the reasons.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from .arguments import TABLES, ColumnTables, MapChunk, MapInputs, unspecialized
from .tuning import tile_of_distance_sums
from .workspace import Workspace

# For each table, the map whose sums by distance are its gradient. "scores" are the gradients of scores, which a
# backward pass computes anyway. The others are written by kernels to the map `pairs`: "composed_scores" are the
# gradients of composed scores, and "probs" are probabilities times their gradients.
SUMMED = {"composed_bias": "scores", "position_bias": "composed_scores", "position_gain": "probs"}


def sums_needed(inputs: MapInputs, wanted: Iterable[str]) -> set[str]:
    """Returns which maps of `SUMMED` a backward pass has to sum, if it returns the gradients of the `wanted` tables.

    A static matrix before the softmax mixes a composed bias too, so the gradient of that matrix also needs the sums of
    the composed scores' gradients.
    """
    needed = {SUMMED[name] for name in wanted}
    if inputs.composed_bias is not None and inputs.pre_static is not None:
        needed.add(SUMMED["position_bias"])
    return needed


class DistanceColumns:
    """The tables of a call, laid out so that column `x` is for distance `farthest - x`.

    Args:
        work: the chunks, whose padding decides how many columns there are.
        inputs: the op's tensors.
        wanted: the tables whose gradients a backward pass returns.
    """

    def __init__(self, work: Workspace, inputs: MapInputs, wanted: Iterable[str] = ()) -> None:
        self.work, self.wanted = work, list(wanted)
        self.tables = {name: table for name in TABLES if (table := getattr(inputs, name)) is not None}
        self.columns = work.queries + work.keys - 1
        self.farthest = work.queries - 1 + work.structure.first_query + work.tiling.before
        self.laid_out = {name: self._lay_out(table) for name, table in self.tables.items()}
        self.mixed_bias = None
        if inputs.composed_bias is not None and inputs.pre_static is not None:
            composed = self.laid_out["composed_bias"]
            self.mixed_bias = torch.addmm(composed, inputs.pre_static.t().float(), composed)
        shape = work.groups * work.heads, self.columns
        zeros = partial(torch.zeros, shape, dtype=torch.float32, device=work.device)
        self.sums = {name: zeros() for name in sums_needed(inputs, wanted)}

    def of_chunk(self, chunk: MapChunk, summed: str = "") -> ColumnTables:
        """The tables for a kernel of a chunk.

        Args:
            summed: the map of `SUMMED` that the kernel can write to `pairs`; it does if sums of this map are needed.
        """
        if not self.tables:
            return ColumnTables()
        return ColumnTables(
            self.laid_out.get("composed_bias"),
            self.mixed_bias,
            self.laid_out.get("position_bias"),
            self.laid_out.get("position_gain"),
            unspecialized(self.columns),
            unspecialized(self._first(chunk)),
            self.work.map("pairs", chunk) if summed in self.sums else None,
        )

    def add(self, name: str, chunk: MapChunk, maps: Tensor | None = None) -> None:
        """Adds a chunk's sums by distance of the map `name` of `SUMMED`, if they are needed.

        Args:
            maps: the map `[items, H, c, n]`, by default `pairs`.
        """
        if name not in self.sums:
            return
        work, step = self.work, chunk.where.step or chunk.sizes.queries
        block_t, block_x, part, warps = tile_of_distance_sums()
        planes, columns = chunk.counts[0] * work.heads, step + chunk.sizes.keys - 1
        parts = -(-chunk.sizes.queries // part)
        sums = torch.empty(planes, parts, columns, dtype=torch.float32, device=work.device)
        work.kernels["dcmha_distance_sums"][planes * -(-columns // block_x), parts](
            work.map("pairs", chunk) if maps is None else maps,
            sums,
            chunk.sizes,
            chunk.where,
            part,
            block_t=block_t,
            block_x=block_x,
            num_warps=warps,
        )
        first = self._first(chunk) - (step - 1)
        total = sums.view(-1, work.groups * work.heads, parts, columns).sum((0, 2))
        self.sums[name][:, first : first + columns] += total

    def gradients(self) -> dict[str, Tensor]:
        """Returns the gradients `[L, heads]` of the wanted tables by name, in float32."""
        return {name: self._gather(self.sums[SUMMED[name]], len(self.tables[name])) for name in self.wanted}

    def static_gradient(self) -> Tensor | float:
        """What a composed bias adds to the gradient `[heads, heads]` of the static matrix before the softmax."""
        if "composed_bias" not in self.laid_out:
            return 0.0
        return self.laid_out["composed_bias"] @ self.sums["composed_scores"].t()

    def _first(self, chunk: MapChunk) -> int:
        """The column of a chunk's first query and its first key."""
        return self.work.queries - 1 + chunk.keys.start - chunk.queries.start

    def _lay_out(self, table: Tensor) -> Tensor:
        """A table `[L, heads]` as columns `[heads, X]` in float32; distances without a row take the nearest row."""
        distance = self.farthest - torch.arange(self.columns, device=table.device)
        return table.float().t()[:, distance.clamp_(0, len(table) - 1)].contiguous()

    def _gather(self, sums: Tensor, rows: int) -> Tensor:
        """The transpose of `_lay_out`: adds the sums `[heads, X]` of all columns to their rows, `[rows, heads]`.

        It adds slices, because the order of an addition by index differs between runs on a GPU.
        """
        nearest = self.farthest - (self.columns - 1)  # the distance of the last column
        sums = sums.flip(1).t()
        inner = min(max(1 - nearest, 0), len(sums))  # the end of the distances of at most 0, which belong to row 0
        outer = min(max(rows - 1 - nearest, inner), len(sums))  # the begin of those that belong to the last row
        grads = sums.new_zeros(rows, sums.shape[1])
        grads[nearest + inner : nearest + outer] = sums[inner:outer]
        grads[0] += sums[:inner].sum(0)
        grads[-1] += sums[outer:].sum(0)
        return grads
