"""Training data that is read and tokenized while the run trains, by a process of its own.

The stream is cut into blocks of `shuffle_buffer` sequences, numbered files in the folder of the run. Inside a block the
sequences are shuffled by the seed, so what an update reads depends on its number alone. Each block also stores where
the stream continues behind it, so that an interrupted run can read on. Blocks that no kept checkpoint needs are
deleted.
"""

import multiprocessing
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dynattn.modeling.ops.chunked_loss import IGNORED

from ...common.atomic_file import write_json
from ...common.errors import UserError
from ...common.signals import signals_held_back
from ..arguments import PretrainArguments
from ..outputs import checkpoint
from ..outputs.run_folder import RunFolder
from ..stopping import ignore_signals
from .batch_order import TrainingOrder
from .chat_encoder import ChatEncoder
from .documents import load_stream, reason_of
from .sequences import Sequences, as_item, restarting_positions
from .stream_blocks import FAILURE, Block, block_path, check_failure, written_blocks
from .text_encoder import Encoded, TextEncoder
from .tokenization import encode_batches

# The first documents of a stream: their hash identifies it, and they are held out if no validation data is named.
HELD_OUT_DOCUMENTS = 1000
STREAMED_DOCUMENTS = 100
BLOCKS_AHEAD = 2  # written beyond the block that updates read
POLL_SECONDS = 0.05
# In place of the number of a wanted block, asks the writing process to end.
ENOUGH = -2
# How long the writing process may then take before it is killed.
SECONDS_TO_END = 2.0


def split_stream(stream: IterableDataset, named: Dataset | None) -> tuple[Dataset, Dataset]:
    """The first documents of a stream, and the validation documents: those that are `named`, or else the same ones.

    Raises:
        UserError: the stream cannot be read, or holds too few documents.
    """
    try:
        texts = [row["text"] for row in stream.take(HELD_OUT_DOCUMENTS + 1)]
    except UserError:
        raise
    except Exception as error:  # network and parsers raise whatever they like
        raise UserError(f"cannot read the head of the stream: {reason_of(error)}; check the data") from error
    first = Dataset.from_dict({"text": texts[:HELD_OUT_DOCUMENTS]})
    if named is not None and texts:
        return first, named
    if len(texts) <= HELD_OUT_DOCUMENTS:  # then none is left to train on
        raise UserError(
            f"the stream ends after {len(texts)} documents, and the first {HELD_OUT_DOCUMENTS} are held out; name "
            "validation_dataset, or leave out streaming"
        )
    return first, first


class StreamedSequences(Sequences):
    """Sequences of a stream that another process writes; reading one waits until it is written."""

    def __init__(self, folder: Path, arguments: PretrainArguments) -> None:
        self.folder, self.size, self.length = folder, arguments.shuffle_buffer, arguments.sequence_length
        self.mask_documents = arguments.mask_documents
        self._read: tuple[int, Block] | None = None

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Sequence `index` of the stream: `input_ids`, `labels` and perhaps `position_ids`, each `[T]`."""
        number, row = divmod(index, self.size)
        block = self._wait_for(number)
        tokens = block.tokens[row].astype(np.int64)
        labels = np.where(block.targets[row] & ~block.starts[row], tokens, IGNORED)
        item = {"input_ids": tokens, "labels": labels}
        if self.mask_documents:
            item["position_ids"] = restarting_positions(np.flatnonzero(block.starts[row]), self.length)
        return as_item(item)

    def documents(self, index: int) -> list[str]:
        return [f"sequence {index} of the stream"]

    def describe(self) -> str:
        return f"a stream, in sequences of {self.length} that are shuffled in blocks of {self.size:,}"

    def _wait_for(self, number: int) -> Block:
        """The block `number`, once it is written."""
        if self._read is None or self._read[0] != number:
            path = block_path(self.folder, number)
            while not path.exists():
                check_failure(self.folder)
                time.sleep(POLL_SECONDS)
            self._read = number, Block.load(path)
        return self._read[1]


class StreamOrder(TrainingOrder):
    """The order of a stream, whose blocks are shuffled as epochs are. It tells the writing process which are needed.

    Nothing is read before `feeding`.
    """

    def __init__(
        self, arguments: PretrainArguments, run: RunFolder, tokenizer: PreTrainedTokenizerBase, global_batch: int
    ) -> None:
        super().__init__(arguments.shuffle_buffer, global_batch, arguments.seed)
        self.pass_length = sys.maxsize  # nobody knows where a stream ends
        self.writer = BlockWriter(arguments, run, tokenizer, global_batch)
        self._wanted = multiprocessing.get_context("spawn").Value("q", -1)

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The indices `[N]` of the sequences that are read at `places` `[N]`, counted from 0."""
        blocks = places // self.sequences
        self._wanted.value = max(self._wanted.value, int(blocks.max()))
        return blocks * self.sequences + super().at(places)

    def passes(self, steps: int) -> dict[str, float]:
        return {}

    @contextmanager
    def feeding(self, is_main: bool) -> Iterator[None]:
        """Runs the writing process during the block, if this is the main process."""
        if not is_main:
            yield
            return
        (self.writer.folder / FAILURE).unlink(missing_ok=True)
        context = multiprocessing.get_context("spawn")
        # A daemon could not start processes of its own, which tokenize.
        process = context.Process(target=self.writer.run, args=(self._wanted,))
        with signals_held_back():
            process.start()
        finished = threading.Event()
        watch = threading.Thread(target=self.writer.tell_if_it_dies, args=(process, finished), daemon=True)
        watch.start()
        try:
            yield
        finally:
            finished.set()
            # The process gets time to end by itself, because Python warns about the semaphores of a killed process. The
            # watching thread is joined in its place: if two threads wait for a process, one misses its exit code.
            self._wanted.value = ENOUGH
            watch.join(SECONDS_TO_END)
            process.kill()  # It ignores the signals that end a run. Its files are complete or absent at any time.
            watch.join()


class BlockWriter:
    """Reads the stream, tokenizes it and writes blocks, a few more than are wanted."""

    def __init__(
        self, arguments: PretrainArguments, run: RunFolder, tokenizer: PreTrainedTokenizerBase, global_batch: int
    ) -> None:
        self.arguments, self.checkpoints, self.global_batch = arguments, run.checkpoints, global_batch
        self.folder = run.stream
        self.encoder = ChatEncoder(tokenizer) if arguments.chat_column else TextEncoder(tokenizer)

    def run(self, wanted: Any) -> None:
        """Writes blocks until the process ends; `wanted` is the highest block number that an update has asked for."""
        ignore_signals()
        parent = os.getppid()

        def is_needed() -> bool:
            return os.getppid() == parent and wanted.value != ENOUGH

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            blocks, number = None, 0
            while is_needed():
                if wanted.value < 0 or (blocks is not None and number > wanted.value + BLOCKS_AHEAD):
                    time.sleep(POLL_SECONDS)
                    continue
                if blocks is None:
                    number, previous = self._last_block(wanted.value)
                    blocks = self._blocks(previous)
                block = next(blocks)
                if not is_needed():  # Reading takes long, and the folder may be another run's by now.
                    return
                block.save(block_path(self.folder, number))
                number += 1
                self._delete_old()
        except Exception as error:  # whatever it is, processes that wait for the next block have to stop
            if is_needed():
                write_json(self.folder / FAILURE, {"error": reason_of(error)})

    def tell_if_it_dies(self, process: BaseProcess, finished: threading.Event) -> None:
        """Waits for the end of the writing process; if it ends too early, stops those who wait for a block."""
        process.join()
        if not finished.is_set() and not (self.folder / FAILURE).exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / FAILURE, {"error": f"the reading process ended with status {process.exitcode}"})

    def _last_block(self, wanted: int) -> tuple[int, Block | None]:
        """The number of the next block to write, and the block before it if there is one to go on from."""
        written = written_blocks(self.folder)
        if not written or written[0] > wanted:
            return 0, None
        # Behind a gap lie blocks from before the stream was read anew, which are written again.
        last = next(number for number in count(written[0]) if number + 1 not in written)
        return last + 1, Block.load(block_path(self.folder, last))

    def _blocks(self, previous: Block | None) -> Iterator[Block]:
        """All blocks after `previous`, or from the start of the stream; at its end the stream begins again."""
        size, length = self.arguments.shuffle_buffer, self.arguments.sequence_length
        columns = np.empty((3, 0), dtype=np.int32) if previous is None else previous.rest
        waiting = [columns]
        for batch, cursor in self._batches({"pass": 0} if previous is None else previous.cursor):
            waiting.append(batch)
            while sum(part.shape[1] for part in waiting) >= size * length:
                columns = np.concatenate(waiting, axis=1)
                block, rest = columns[:, : size * length].reshape(3, size, length), columns[:, size * length :]
                waiting = [rest]
                yield Block(block[0].copy(), block[1].astype(bool), block[2].astype(bool), rest.copy(), cursor)

    def _batches(self, cursor: dict[str, Any]) -> Iterator[tuple[NDArray[np.int32], dict[str, Any]]]:
        """Tokens, starts and targets `[3, N]` of batches of documents, each with the cursor at its end."""
        cursors: deque[dict[str, Any]] = deque()

        def texts() -> Iterator[list[str]]:
            for batch, behind in self._documents(cursor):
                cursors.append(behind)
                yield batch

        for encoded in encode_batches(texts(), self.encoder, self.arguments.tokenizer_workers):
            yield as_columns(encoded), cursors.popleft()

    def _documents(self, cursor: dict[str, Any]) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """Batches of documents from `cursor` on, each with the cursor at its end."""
        for number in count(cursor["pass"]):
            stream = load_stream(self.arguments.dataset, self.arguments)
            if not (self.arguments.validation_dataset or self.arguments.validation_split):
                stream = stream.skip(HELD_OUT_DOCUMENTS)
            if "state" in cursor:
                stream.load_state_dict(cursor["state"])
            rows = iter(stream)
            read = 0
            while texts := [row["text"] for row in islice(rows, STREAMED_DOCUMENTS)]:
                read += len(texts)
                yield texts, {"pass": number, "state": stream.state_dict()}
            if read == 0 and "state" not in cursor:
                raise UserError(f"the stream {self.arguments.dataset} holds no documents to train on")
            cursor = {}

    def _delete_old(self) -> None:
        """Deletes the blocks before the one that a run reads next after resuming from its oldest checkpoint."""
        saved = checkpoint.list_checkpoints(self.checkpoints)
        first = checkpoint.step_of(saved[0]) * self.global_batch // self.arguments.shuffle_buffer if saved else 0
        written = written_blocks(self.folder)
        for number in written[:-1]:
            if number < first:
                block_path(self.folder, number).unlink()


def as_columns(encoded: Encoded) -> NDArray[np.int32]:
    """Tokens, starts and targets `[3, N]` of a batch of documents."""
    starts = np.zeros(len(encoded.tokens), dtype=np.int32)
    starts[np.cumsum(encoded.lengths) - encoded.lengths] = 1
    targets = np.ones_like(starts) if encoded.targets is None else encoded.targets
    return np.stack([encoded.tokens, starts, targets])
