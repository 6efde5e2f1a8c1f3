"""Tables by distance for the chunks of a call.

The bias of a query and a key depends on their distance alone, so the biases of all chunks are views of one block that
is as large as a chunk; a map of all pairs is never made. The same holds for gains.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class DistanceGrid(NamedTuple):
    """The distances of a Toeplitz block `[c, X]`, of which each chunk's distances `[c, n]` are a view.

    The key in column `x` is `t + farthest - x` places before query `t`.
    """

    queries: int  # c, the most queries of a chunk
    farthest: int  # the distance of the first query from the key in column 0
    columns: int  # X

    def rows(self, table: Tensor) -> Tensor:
        """The index of the row of `table` `[L, H]` for each element, `[c, X]`; the nearest row if there is none."""
        queries, columns = (torch.arange(count, device=table.device) for count in (self.queries, self.columns))
        return (queries[:, None] + self.farthest - columns).clamp_(0, table.shape[0] - 1)

    def spread(self, table: Tensor, dtype: torch.dtype) -> Tensor:
        """Spreads a table `[L, H]` to its block `[H, c, X]`, in `dtype`."""
        return table.to(dtype).t()[:, self.rows(table)]

    def gather(self, block: Tensor, table: Tensor) -> Tensor:
        """The gradient `[L, H]` of `table`, from that of its block `[H, c, X]`: sums over all elements of a row."""
        sums = torch.zeros_like(table, dtype=block.dtype)
        return sums.index_add_(0, self.rows(table).flatten(), block.flatten(1).t())


def grid_of(positions: Sequence[int], keys: Sequence[slice], queries: int) -> DistanceGrid:
    """The smallest grid for chunks of up to `queries` queries.

    Args:
        positions: the position of each chunk's first query among the keys.
        keys: the keys that each chunk reads.
    """
    farthest = max((position - span.start for position, span in zip(positions, keys, strict=True)), default=0)
    ahead = max((span.stop - position for position, span in zip(positions, keys, strict=True)), default=0)
    return DistanceGrid(queries, farthest, farthest + ahead)


class ChunkTables(NamedTuple):
    """What is added to a chunk's scores, and what multiplies its probabilities; or the gradients of both."""

    bias: Tensor | None  # [H, c, n]
    gain: Tensor | None  # [H, c, n]


class TableBlocks(NamedTuple):
    """The tables of a call, or the gradients of both, as blocks of one grid."""

    grid: DistanceGrid
    bias: Tensor | None  # [H, c, X]
    gain: Tensor | None  # [H, c, X]

    def of_chunk(self, position: int, queries: int, keys: slice) -> ChunkTables:
        """Views for `keys`, and `queries` queries from `position` among all keys on."""
        shift = self.grid.farthest - position
        columns = slice(keys.start + shift, keys.stop + shift)
        return ChunkTables(*(None if one is None else one[:, :queries, columns] for one in (self.bias, self.gain)))

    def zeros(self) -> "TableBlocks":
        """Zeros in the same shapes, to which gradients are added."""
        empty = (None if one is None else torch.zeros_like(one) for one in (self.bias, self.gain))
        return TableBlocks(self.grid, *empty)
