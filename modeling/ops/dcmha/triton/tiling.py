"""Tilings: how the passes of `dcmha_triton` divide the pairs of queries and keys into chunks.

A chunk is some queries of some items and, for each of their heads, a rectangle `[c, n]` of the map. A `RowTiling` has
chunks of whole rows of the map. The chunks of a `WindowTiling` consist of blocks of `step` queries, each with the `n`
keys that the block reaches: column `s` of row `t` is key `s + t // step * step`, counted from the chunk's first key.

Lengths are multiples of a patch's sides, so that kernels need no bounds on maps. Padding is zero and adds nothing to
gradients: padding keys are hidden, and the output of padding queries has a gradient of zero. `DESIGN.md`, "Memory of a
chunk" and "Windows", has the reasons.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ...masking import Structure
from .arguments import MapInputs
from .tuning import block_of, blocks_of_a_chunk, fewest_rows, fits_in_a_chunk

# Lengths and first keys are multiples of this number, so that loads can be vectors and chunks have whole panels.
ALIGNMENT = 16
# The programs that CUDA takes along the second and along the third side of a grid, along which kernels have the blocks
# of queries of a chunk, and items. The first side takes more.
MOST_PROGRAMS = 65535
# The most queries of a chunk, whose programs have at least 4 of them each with the shipped constants.
MOST_ROWS = MOST_PROGRAMS * 4


@dataclass(frozen=True)
class RowTiling:
    """Chunks of `rows` queries with all keys that they can reach.

    Attributes:
        queries: the number of queries with padding, which comes after the last one.
        keys: the number of keys with padding, which comes after the last one.
        rows: the number of queries of each chunk but the last one.
        spans: the queries and the keys of all chunks.
        before: the number of padding keys before the first one.
        step: the number of a block's queries; None, since there are no blocks.
    """

    queries: int
    keys: int
    rows: int
    spans: tuple[tuple[slice, slice], ...]
    before: ClassVar[int] = 0
    step: ClassVar[int | None] = None

    @property
    def largest(self) -> int:
        """The number of elements of the largest chunk's map, for one head of an item."""
        return min(self.rows, self.queries) * max((self.columns(keys) for _, keys in self.spans), default=0)

    def columns(self, keys: slice) -> int:
        """Returns `n`, the number of columns of the maps of a chunk with these keys."""
        return keys.stop - keys.start

    def slots(self, queries: int) -> int:
        """How many places a key's gradients need, one for each program of a chunk that adds to them.

        Each has this number of queries, the last one fewer.
        """
        return -(-min(self.rows, self.queries) // queries)


@dataclass(frozen=True)
class WindowTiling:
    """Chunks of `blocks` blocks of a causal window, with padding also before the first key.

    Attributes that are not explained here are those of `RowTiling`.
    """

    real_queries: int  # T
    real_keys: int  # S
    step: int  # queries of a block
    reach: int  # n, the keys of a block
    blocks: int  # of a chunk
    position: int  # of the first query among the keys

    @property
    def count(self) -> int:
        """The number of blocks."""
        return -(-self.real_queries // self.step)

    @property
    def queries(self) -> int:
        """The number of queries with padding, which comes after the last one."""
        return self.count * self.step

    @property
    def before(self) -> int:
        """The number of padding keys before the first one.

        They stand for the keys that the first block would reach before the first one, or align its first key.
        """
        return -self._first if self._first < 0 else -self._first % ALIGNMENT

    @property
    def keys(self) -> int:
        """The number of keys with padding before the first and after the last one."""
        return max(self._keys_of(0, self.count).stop, aligned(self.before + self.real_keys))

    @property
    def spans(self) -> tuple[tuple[slice, slice], ...]:
        """The queries and the keys of all chunks."""
        starts = range(0, self.count, self.blocks)
        blocks = ((start, min(start + self.blocks, self.count)) for start in starts)
        return tuple((slice(start * self.step, stop * self.step), self._keys_of(start, stop)) for start, stop in blocks)

    @property
    def largest(self) -> int:
        """The number of elements of the largest chunk's map, for one head of an item."""
        return min(self.blocks, self.count) * self.step * self.reach

    def columns(self, keys: slice) -> int:
        """Returns `n`, the number of columns of all maps."""
        return self.reach

    def slots(self, queries: int) -> int:
        """How many places a key's gradients need: after so many programs of a chunk none has the same keys any more.

        Each has this number of queries, which divides `step`.
        """
        return self.step // queries * min(self.blocks, self.count, -(-self.reach // self.step))

    @property
    def _first(self) -> int:
        """The first block's first key; negative if the block reaches back to before the first key."""
        return self.step - self.reach + self.position

    def _keys_of(self, start: int, stop: int) -> slice:
        """The keys that blocks from `start` up to `stop` reach."""
        first = self._first + self.before
        return slice(first + start * self.step, first + (stop - 1) * self.step + self.reach)


def choose_tiling(
    inputs: MapInputs, structure: Structure, groups: int, patch: tuple[int, int]
) -> RowTiling | WindowTiling:
    """Returns the tiling of a problem: by window if it is causal and the sequence has at least two blocks.

    Args:
        inputs: the op's tensors, of which the shapes and, if on a CPU, `first_keys` are read.
        structure: causality and window.
        groups: items per row of the batch.
        patch: the sides of a patch, of which a chunk's numbers of queries and of keys are multiples.
    """
    (batch, heads, queries, _), keys = inputs.query.shape, inputs.key.shape[2]
    window = structure.sliding_window
    if structure.is_causal and window is not None:
        step = aligned(block_of(window), max(patch[0], ALIGNMENT))
        reach = aligned(window - 1 + step, max(patch[1], ALIGNMENT))
        if queries >= 2 * step and keys >= reach:
            blocks = min(blocks_of_a_chunk(heads * groups * step * reach), max(1, MOST_ROWS // step))
            return WindowTiling(queries, keys, step, reach, blocks, structure.first_query)
    rows = _rows_of_a_chunk(structure, batch * heads, patch[0])
    # Patches may have fewer queries than are aligned; lengths that were not would have kernels of their own.
    lengths = aligned(queries, max(patch[0], ALIGNMENT)), aligned(keys, patch[1])
    return RowTiling(*lengths, rows, tuple(_spans(structure, lengths[0], rows, patch[1], inputs.first_keys)))


def _rows_of_a_chunk(structure: Structure, heads: int, block: int) -> int:
    """How many queries a chunk has: a doubling of the least number, while maps of `heads` heads fit in a chunk.

    Args:
        heads: of all items together.
    """
    queries, rows = structure.queries, aligned(fewest_rows(), block)
    while rows < queries and 2 * rows <= MOST_ROWS:
        keys = structure.reach(slice(max(0, queries - 2 * rows), queries))
        if not fits_in_a_chunk(heads * 2 * rows * (keys.stop - keys.start)):
            break
        rows *= 2
    return rows


def _spans(
    structure: Structure, queries: int, rows: int, block: int, first_keys: Tensor | None
) -> Iterator[tuple[slice, slice]]:
    """Yields the queries and the keys of each chunk that sees any key, in whole patches.

    Keys before the first ones of `first_keys` `[rows of the batch, T]` are left out if these are on the CPU; reading
    them from a device would wait for it.
    """
    is_known = first_keys is not None and first_keys.device.type == "cpu" and first_keys.numel() > 0
    known = first_keys if is_known else None
    for start in range(0, structure.queries, rows):
        real = slice(start, min(start + rows, structure.queries))
        keys = structure.reach(real)
        first = keys.start if known is None else max(keys.start, int(known[:, real].min()))
        if first < keys.stop:
            whole = slice(first // block * block, aligned(keys.stop, block))
            yield slice(start, min(start + rows, queries)), whole


def add_blocks(total: Tensor, parts: Tensor, step: int) -> None:
    """Adds `parts` `[items, blocks, n, ..]`, whose keys overlap, to `total` `[items, all keys of a chunk, ..]`.

    Each block's keys start `step` keys after those of the block before it.
    """
    if parts.shape[1] == 1:
        total += parts[:, 0]
        return
    for first in range(0, parts.shape[2], step):
        piece = parts[:, :, first : first + step]
        total[:, first:].unfold(1, piece.shape[2], step)[:, : parts.shape[1]] += piece.movedim(2, -1)


def aligned(length: int, multiple: int = ALIGNMENT) -> int:
    """Returns the smallest multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple
