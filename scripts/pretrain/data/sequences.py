"""The sequences that training and validation read, all of one length, and how they are divided among processes."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset


class Sequences(Dataset[dict[str, Tensor]], ABC):
    """Items of `length` tokens.

    Each item holds `input_ids` and `labels`, both `[T]`; the model shifts the labels, as Transformers does. An item
    may hold `shift_labels` `[T]` that are shifted already, and `position_ids` `[T]` that restart with each document,
    from which Transformers derives block-diagonal attention as long as no attention mask is given.

    Attributes:
        text_bytes: length in UTF-8 of the text that the targets spell; only validation data has it.
    """

    length: int
    text_bytes: int

    @abstractmethod
    def __len__(self) -> int:
        """How many items there are."""

    @abstractmethod
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Item `index`: `input_ids`, `labels` and perhaps more, each `[T]`."""

    @abstractmethod
    def documents(self, index: int) -> list[str]:
        """The names of the documents in item `index`, for whoever wants to look at them."""

    @abstractmethod
    def describe(self) -> str:
        """The number of documents, tokens and sequences, in words for the terminal."""

    def share(self, process: int, processes: int, batch_size: int) -> Iterator[Sequence[int]]:
        """The indices of one process's batches, so that all processes together read every sequence once."""
        indices = range(process, len(self), processes)
        for begin in range(0, len(indices), batch_size):
            yield indices[begin : begin + batch_size]


class MixedSequences(Sequences):
    """The items of several named sources, one source after the other."""

    def __init__(self, sources: Mapping[str, Sequences]) -> None:
        self.sources = dict(sources)
        self.length = next(iter(self.sources.values())).length
        self.offsets = [0, *accumulate(len(part) for part in self.sources.values())]

    def __len__(self) -> int:
        return self.offsets[-1]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Item `index` of all sources together, with tensors `[T]`."""
        name, inner = self._locate(index)
        return self.sources[name][inner]

    def documents(self, index: int) -> list[str]:
        name, inner = self._locate(index)
        return [f"{name}: {document}" for document in self.sources[name].documents(inner)]

    def describe(self) -> str:
        return "; ".join(f"{name}: {part.describe()}" for name, part in self.sources.items())

    def _locate(self, index: int) -> tuple[str, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        place = bisect_right(self.offsets, index) - 1
        return list(self.sources)[place], index - self.offsets[place]


def as_item(values: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    """Arrays `[T]` as tensors."""
    return {name: torch.from_numpy(array) for name, array in values.items()}


def restarting_positions(starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Positions `[length]` that count from 0 and restart at each of `starts`."""
    origin = np.zeros(length, dtype=np.int64)
    origin[starts] = starts
    return np.arange(length) - np.maximum.accumulate(origin)
