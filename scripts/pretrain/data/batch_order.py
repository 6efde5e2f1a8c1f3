"""Which sequences each update sees: a pure function of the seed and the step, so that resuming needs no replay."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

# The length of the blocks of a mixture, or the greatest one where an epoch is divided into whole blocks.
MIXTURE_BLOCK = 1 << 14


class TrainingOrder:
    """The order in which updates read the sequences: each takes the next `global_batch`, epoch after epoch.

    A place is a position in this order, counted from 0 over all epochs. Each epoch is shuffled by `seed`, or in the
    order of the data if `seed` is None. An update may span the end of an epoch. The first `skip` places are passed
    over.

    Attributes:
        pass_length: how many sequences a run of one epoch reads.
    """

    def __init__(self, sequences: int, global_batch: int, seed: int | None, skip: int = 0) -> None:
        self.sequences, self.global_batch, self.seed, self.skip = sequences, global_batch, seed, skip
        self.pass_length: float = sequences
        self._epoch, self._permutation = -1, np.empty(0, dtype=np.int64)

    def __getitem__(self, step: int) -> NDArray[np.int64]:
        """The indices `[global_batch]` of the sequences that update `step`, counted from 0, reads."""
        return self.at(self.places(step))

    def places(self, step: int) -> NDArray[np.int64]:
        """The places `[global_batch]` that update `step`, counted from 0, reads."""
        begin = self.skip + step * self.global_batch
        return np.arange(begin, begin + self.global_batch)

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The indices `[N]` of the sequences that are read at `places` `[N]`, counted from 0."""
        epochs, offsets = np.divmod(places, self.sequences)
        return np.concatenate([self._shuffled(epoch)[offsets[epochs == epoch]] for epoch in np.unique(epochs)])

    def passes(self, steps: int) -> dict[str, float]:
        """How often the data is read by the first `steps` updates, by source if it has several."""
        return {"the data": steps * self.global_batch / self.sequences}

    def passes_for_metrics(self, steps: int) -> dict[str, float]:
        """`passes` as fields of the metrics: `passes`, or `passes_SOURCE` for each of several sources."""
        passes = self.passes(steps)
        return {"passes" if len(passes) == 1 else f"passes_{name}": count for name, count in passes.items()}

    @contextmanager
    def feeding(self, is_main: bool) -> Iterator[None]:
        """Provides the data while updates read it; only streams need that, and only the main process does it."""
        yield

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        if self.seed is None:
            return np.arange(self.sequences)
        if epoch != self._epoch:
            self._permutation = np.random.default_rng((self.seed, int(epoch))).permutation(self.sequences)
            self._epoch = epoch
        return self._permutation


class MixtureOrder(TrainingOrder):
    """Draws every update from several sources, each of which is read epoch after epoch at its own pace.

    The order consists of blocks of equal length. A source has the same number of places in each block, in proportion to
    its weight; the order of the sources is shuffled for each block. So a run that ends inside a block may have read a
    source a little more or less often than its weight says.

    Attributes:
        block: the number of places in a block.

    Args:
        names: of the sources.
        sequences: how many sequences each has; their indices follow those of the sources before it.
        weights: of the sources, positive; only their ratios matter.
        skip: places to pass over.
    """

    def __init__(
        self,
        names: Sequence[str],
        sequences: Sequence[int],
        weights: Sequence[float],
        global_batch: int,
        seed: int,
        skip: int = 0,
    ) -> None:
        super().__init__(sum(sequences), global_batch, seed, skip)
        self.names, self.sizes, self.weights = list(names), list(sequences), list(weights)
        self.divide(MIXTURE_BLOCK)
        self.orders = [TrainingOrder(size, 1, seed + 1 + source) for source, size in enumerate(sequences)]
        self.offsets = np.cumsum(sequences) - np.array(sequences)

    def divide(self, block: int) -> None:
        """Sets the number of places in a block."""
        self.block, self.quotas = block, apportion(self.weights, block)
        self._shuffled_block, self._sources = -1, np.empty(0, dtype=np.int64)

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The indices `[N]` of the sequences that are read at `places` `[N]`, counted from 0."""
        blocks, offsets = np.divmod(places, self.block)
        return np.concatenate([self._in_block(int(block), offsets[blocks == block]) for block in np.unique(blocks)])

    def passes(self, steps: int) -> dict[str, float]:
        total = steps * self.global_batch / self.block
        return {
            name: float(total * quota / size)
            for name, quota, size in zip(self.names, self.quotas, self.sizes, strict=True)
        }

    def _in_block(self, block: int, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sequences `[N]` at `offsets` `[N]` in a block: each is the next one of the source at that place."""
        self._shuffle_block(block)
        turns, ranks = self._sources[offsets], block * self.quotas[self._sources[offsets]] + self._ranks[offsets]
        chosen = np.empty(len(offsets), dtype=np.int64)
        for source in np.unique(turns):
            mine = turns == source
            chosen[mine] = self.offsets[source] + self.orders[source].at(ranks[mine])
        return chosen

    def _shuffle_block(self, block: int) -> None:
        """Sets the source of each place of a block, `[block]`, and how often it came before in this block."""
        if block == self._shuffled_block:
            return
        turns = np.repeat(np.arange(len(self.quotas)), self.quotas)
        self._sources = np.random.default_rng((self.seed or 0, block)).permutation(turns)
        self._ranks = np.empty(self.block, dtype=np.int64)
        for source, quota in enumerate(self.quotas):
            self._ranks[self._sources == source] = np.arange(quota)
        self._shuffled_block = block


def whole(count: float) -> int:
    """The least whole number that is not below `count`, but for its last digits: 1.1 * 50 is a little more than 55."""
    return math.ceil(round(count, 6))


def block_within(pass_length: float, sources: int) -> int:
    """The length of blocks into which an epoch of `pass_length` sequences can be divided, so that it ends with one.

    Then each source is read as often as its epochs say. A block has a place for each source, and up to `MIXTURE_BLOCK`.
    """
    sequences = whole(pass_length)
    return max(math.ceil(sequences / math.ceil(sequences / MIXTURE_BLOCK)), sources)


def apportion(weights: Sequence[float], places: int) -> NDArray[np.int64]:
    """Divides `places` in proportion to `weights` `[S]` (largest remainder method), with at least one for each."""
    assert places >= len(weights)
    exact = np.array(weights) / sum(weights) * places
    shares = np.maximum(np.floor(exact), 1).astype(np.int64)
    while (left := places - int(shares.sum())) != 0:
        missing = exact - shares
        chosen = np.argmax(missing) if left > 0 else np.argmin(np.where(shares > 1, missing, np.inf))
        shares[chosen] += np.sign(left)
    return shares


class ProcessBatches(Sampler[list[tuple[int, int]]]):
    """The batches that one process, or a group that shares sequences, reads in its forward passes, for some updates.

    A sequence is given as `(index, place)`. The place in the order is another one each time that a sequence is read, so
    random masks and positions can differ each time.

    An update's sequences are laid out as `[gradient accumulation, processes, batch]` (see `share_of`), so that only the
    product of these sizes decides what an update sees.
    """

    def __init__(self, order: TrainingOrder, steps: range, batch_size: int, process: int, processes: int) -> None:
        self.order, self.steps = order, steps
        self.batch_size, self.process, self.processes = batch_size, process, processes

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in self.steps:
            reads = np.stack([self.order[step], self.order.places(step)], axis=-1)
            mine = share_of(reads, self.process, self.processes, self.batch_size)
            yield from ([tuple(read) for read in batch] for batch in mine.tolist())


def share_of(update: NDArray[np.int64], process: int, processes: int, batch_size: int) -> NDArray[np.int64]:
    """What one of the processes reads of an update `[global_batch, ...]`: `[gradient accumulation, batch, ...]`."""
    return update.reshape(-1, processes, batch_size, *update.shape[1:])[:, process]
