"""How the passes of `dcmha_triton` cut the pairs of queries and keys into chunks, and where these lie in memory.

A chunk is some queries and a rectangle `[c, n]` of maps for each head of some items. It holds whole rows of the map
(`RowTiling`), or a band of it (`WindowTiling`): blocks of `step` queries, each with the `n` keys that end where it ends.
There column `s` of row `t` is key `s + t // step * step`, counted from the chunk's first key, so that a band of any length is
one chunk, and no input is copied.

Lengths are those of whole patches, so that kernels need no bounds on maps. Padding is zero and adds nothing to
gradients: keys in it are hidden, and the gradients of the output of queries in it are zero.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ...masking import Structure
from .arguments import MapInputs, MapSettings
from .tuning import block_of, blocks_of_a_chunk, fewest_rows, fits_in_a_chunk

# Lengths and first keys are multiples of this: vectors of memory, and panels of factors.
ALIGNMENT = 16


@dataclass(frozen=True)
class RowTiling:
    """Chunks of `rows` queries with all keys that they can reach.

    Attributes:
        queries, keys: lengths, with padding after the last one.
        spans: the queries and the keys of all chunks.
    """

    queries: int
    keys: int
    rows: int
    spans: tuple[tuple[slice, slice], ...]
    before: ClassVar[int] = 0
    step: ClassVar[int | None] = None

    @property
    def largest(self) -> int:
        """Entries of the largest map of one head of an item."""
        return min(self.rows, self.queries) * max((self.columns(keys) for _, keys in self.spans), default=0)

    def columns(self, keys: slice) -> int:
        """How many of a chunk's keys each of its rows has."""
        return keys.stop - keys.start


@dataclass(frozen=True)
class WindowTiling:
    """Chunks of `blocks` blocks of a causal window; keys before the first one are padding too."""

    real_queries: int  # T
    real_keys: int  # S
    step: int  # c
    reach: int  # n
    blocks: int

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return -(-self.real_queries // self.step)

    @property
    def queries(self) -> int:
        return self.count * self.step

    @property
    def before(self) -> int:
        """How many keys the first block lacks; or what takes its first key to a multiple of the alignment."""
        return -self._first if self._first < 0 else -self._first % ALIGNMENT

    @property
    def keys(self) -> int:
        return self._keys_of(0, self.count).stop

    @property
    def spans(self) -> tuple[tuple[slice, slice], ...]:
        starts = range(0, self.count, self.blocks)
        blocks = ((start, min(start + self.blocks, self.count)) for start in starts)
        return tuple((slice(start * self.step, stop * self.step), self._keys_of(start, stop)) for start, stop in blocks)

    @property
    def largest(self) -> int:
        return min(self.blocks, self.count) * self.step * self.reach

    def columns(self, keys: slice) -> int:
        return self.reach

    @property
    def _first(self) -> int:
        """The first block's first key; below zero if it lacks some."""
        return self.step - self.reach + self.real_keys - self.real_queries

    def _keys_of(self, start: int, stop: int) -> slice:
        first = self._first + self.before
        return slice(first + start * self.step, first + (stop - 1) * self.step + self.reach)


def choose_tiling(inputs: MapInputs, settings: MapSettings, patch: tuple[int, int]) -> RowTiling | WindowTiling:
    """Returns how to cut a problem.

    Args:
        patch: queries and keys that the sides of chunks are multiples of.
    """
    (batch, heads, queries, _), keys = inputs.query.shape, inputs.key.shape[2]
    structure = Structure(queries, keys, settings.is_causal, settings.sliding_window)
    if settings.is_causal and settings.sliding_window is not None:
        step = aligned(block_of(settings.sliding_window), max(patch[0], ALIGNMENT))
        reach = aligned(settings.sliding_window - 1 + step, max(patch[1], ALIGNMENT))
        if queries >= 2 * step and keys >= reach:
            return WindowTiling(queries, keys, step, reach, blocks_of_a_chunk(heads * settings.groups * step * reach))
    rows = _rows_of_a_chunk(structure, batch * heads, patch[0])
    lengths = aligned(queries, patch[0]), aligned(keys, patch[1])
    return RowTiling(*lengths, rows, tuple(_spans(structure, lengths[0], rows, patch[1], inputs.first_keys)))


def _rows_of_a_chunk(structure: Structure, heads: int, block: int) -> int:
    """How many queries a chunk has, where its maps have so many heads of all items."""
    queries, rows = structure.queries, aligned(fewest_rows(), block)
    while rows < queries:
        keys = structure.reach(slice(max(0, queries - 2 * rows), queries))
        if not fits_in_a_chunk(heads * 2 * rows * (keys.stop - keys.start)):
            break
        rows *= 2
    return rows


def _spans(
    structure: Structure, queries: int, rows: int, block: int, first_keys: Tensor | None
) -> Iterator[tuple[slice, slice]]:
    """Whole patches of the queries and the keys of all chunks but those that see no key.

    First keys shorten them where they are known without waiting for a device.
    """
    known = first_keys if first_keys is not None and first_keys.device.type == "cpu" else None
    for start in range(0, structure.queries, rows):
        real = slice(start, min(start + rows, structure.queries))
        keys = structure.reach(real)
        first = keys.start if known is None else max(keys.start, int(known[:, real].min()))
        if first < keys.stop:
            whole = slice(first // block * block, aligned(keys.stop, block))
            yield slice(start, min(start + rows, queries)), whole


def add_blocks(total: Tensor, parts: Tensor, step: int) -> None:
    """Adds rows of keys `[items, blocks, n, ..]`, whose blocks overlap, to `[items, all keys of a chunk, ..]`."""
    for first in range(0, parts.shape[2], step):
        piece = parts[:, :, first : first + step]
        total[:, first:].unfold(1, piece.shape[2], step)[:, : parts.shape[1]] += piece.movedim(2, -1)


def aligned(length: int, multiple: int = ALIGNMENT) -> int:
    """Returns the next multiple."""
    return -(-length // multiple) * multiple
