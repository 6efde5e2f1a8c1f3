"""Which sequences each update sees: a pure function of the seed and the step, so that resuming needs no replay."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler


class TrainingOrder:
    """The order in which updates read the sequences: each takes the next `global_batch`, epoch after epoch.

    An update may span the end of an epoch. Each epoch is shuffled by `seed`, or in the order of the data if `seed` is
    None.
    """

    def __init__(self, sequences: int, global_batch: int, seed: int | None) -> None:
        self.sequences, self.global_batch, self.seed = sequences, global_batch, seed
        self._epoch, self._permutation = -1, np.empty(0, dtype=np.int64)

    def __getitem__(self, step: int) -> NDArray[np.int64]:
        """The indices `[global_batch]` of the sequences that update `step`, counted from 0, reads."""
        places = np.arange(step * self.global_batch, (step + 1) * self.global_batch)
        epochs, offsets = np.divmod(places, self.sequences)
        return np.concatenate([self._shuffled(epoch)[offsets[epochs == epoch]] for epoch in np.unique(epochs)])

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        if self.seed is None:
            return np.arange(self.sequences)
        if epoch != self._epoch:
            self._permutation = np.random.default_rng((self.seed, int(epoch))).permutation(self.sequences)
            self._epoch = epoch
        return self._permutation


class ProcessBatches(Sampler[list[int]]):
    """The batches of indices that one process reads in its forward passes, in order, for a range of updates.

    An update's sequences are laid out as `[gradient accumulation, processes, batch]`, so that only the product of these
    sizes decides what an update sees.
    """

    def __init__(self, order: TrainingOrder, steps: range, batch_size: int, process: int, processes: int) -> None:
        self.order, self.steps = order, steps
        self.batch_size, self.process, self.processes = batch_size, process, processes

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            passes = self.order[step].reshape(-1, self.processes, self.batch_size)
            yield from passes[:, self.process].tolist()
