"""Best-fit-decreasing packing of documents into sequences (Ding et al., "Fewer Truncations", arXiv 2404.10830)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Packs:
    """Which pieces of documents each sequence holds.

    Attributes:
        document, offset, size: `[pieces]` the document of each piece, where in it the piece begins, and its tokens.
        first: `[sequences + 1]` the first piece of each sequence; the pieces of a sequence lie side by side.
        cut: documents that are in several pieces.
    """

    document: NDArray[np.int64]
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    first: NDArray[np.int64]
    cut: int

    def pieces(self, sequence: int) -> range:
        """The numbers of the pieces in `sequence`."""
        return range(int(self.first[sequence]), int(self.first[sequence + 1]))


def pack_best_fit(lengths: NDArray[np.int64], length: int) -> Packs:
    """Packs documents of `lengths` `[documents]` tokens into sequences of `length`.

    Pieces are placed from the longest to the shortest, each into the sequence with the least room that suffices. A last
    piece of a single token is left out, because the first token of a piece is never a target.
    """
    document, offset, size = cut_documents(lengths, length)
    order = np.argsort(-size, kind="stable")
    sequence = np.empty(len(size), dtype=np.int64)
    sequence[order] = assign(size[order], length)
    by_sequence = np.argsort(sequence, kind="stable")
    count = int(sequence.max(initial=-1)) + 1
    first = np.searchsorted(sequence[by_sequence], np.arange(count + 1))
    cut = int((lengths > length).sum())
    return Packs(document[by_sequence], offset[by_sequence], size[by_sequence], first, cut)


def cut_documents(
    lengths: NDArray[np.int64], length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Document, offset and size `[pieces]` of all pieces of at most `length` tokens, at least two each."""
    pieces = -(-lengths // length)
    document = np.repeat(np.arange(len(lengths)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset = number * length
    size = np.minimum(lengths[document] - offset, length)
    kept = size > 1
    return document[kept], offset[kept], size[kept]


def assign(sizes: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """The sequence `[pieces]` of each of the descending `sizes` by best fit.

    Bit `room` of the integer `rooms` says whether a sequence has exactly that much room. So the smallest room that
    suffices for a size is the lowest bit that is set at or above the size.
    """
    waiting: list[list[int]] = [[] for _ in range(length + 1)]
    rooms, count = 0, 0
    sequence = np.empty(len(sizes), dtype=np.int64)
    for index, size in enumerate(sizes.tolist()):
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            chosen = waiting[room].pop()
            rooms ^= 0 if waiting[room] else 1 << room
        else:
            room, chosen, count = length, count, count + 1
        sequence[index] = chosen
        if left := room - size:
            waiting[left].append(chosen)
            rooms |= 1 << left
    return sequence
