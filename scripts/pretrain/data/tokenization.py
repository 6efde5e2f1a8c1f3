"""Documents become tokens, in several processes if asked to, from where an interrupted run stopped."""

import json
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ...common.atomic_file import flush, write_json
from ..stopping import ignore_signals
from .encoders import Encoded, Encoder
from .token_stream import STARTS, STREAM, TARGETS, TOKENS

logger = logging.getLogger(__name__)

BATCH_DOCUMENTS = 1000
# Documents between two notes of how far the files are complete.
NOTE_DOCUMENTS = 50_000
LENGTHS, NOTE = "lengths.bin", "written.json"
# Batches that each worker has in hand or waiting, so that none is idle and few are in memory.
WAITING_BATCHES = 3
# Seconds between two looks of a worker whether its parent is there.
PARENT_SECONDS = 1.0


@dataclass
class Written:
    """How much of a stream is on disk."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0

    def add(self, batch: Encoded) -> None:
        """Counts a batch of documents."""
        self.documents += len(batch.lengths)
        self.tokens += len(batch.tokens)
        self.text_bytes += batch.text_bytes


def write_stream(
    dataset: Dataset, encoder: Encoder, folder: Path, workers: int = 0, identity: dict[str, str] | None = None
) -> None:
    """Tokenizes the column `text` of `dataset` into `folder`, going on where an interrupted call had stopped.

    Args:
        workers: processes that tokenize; with 0 this process does, on all cores if the tokenizer can use them.
        identity: what the stream is made from, to be stored with it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = _read_note(folder)
    started, before = time.perf_counter(), written.tokens
    names = [TOKENS, LENGTHS, *([TARGETS] if encoder.marks_targets else [])]
    with ExitStack() as stack:
        files = {name: stack.enter_context(_open_at(folder / name, _bytes_of(name, written))) for name in names}
        bar = stack.enter_context(tqdm(initial=written.tokens, unit=" tokens", unit_scale=True, desc="tokenizing"))
        rest = dataset.select(range(written.documents, len(dataset)))
        noted = written.documents
        for batch in encode_all(rest, encoder, workers):
            for name, file in files.items():
                file.write(batch.column(name).tobytes())
            written.add(batch)
            bar.update(len(batch.tokens))
            if written.documents - noted >= NOTE_DOCUMENTS:
                _note(folder, files.values(), written)
                noted = written.documents
    _finish(folder, written, identity or {})
    seconds = time.perf_counter() - started
    logger.info("%d tokens in %.0f s, %.0f a second", written.tokens, seconds, (written.tokens - before) / seconds)


def encode_all(dataset: Dataset, encoder: Encoder, workers: int) -> Iterator[Encoded]:
    """The documents of `dataset` in order, as batches of tokens; `workers` processes make them, or this one if 0."""
    return encode_batches((batch["text"] for batch in dataset.iter(batch_size=BATCH_DOCUMENTS)), encoder, workers)


def encode_batches(batches: Iterator[list[str]], encoder: Encoder, workers: int) -> Iterator[Encoded]:
    """Batches of documents as tokens, in order; `workers` processes make them, or this one if 0.

    With workers, batches are taken up to `WAITING_BATCHES` for each of them before they are asked for.
    """
    if workers == 0:
        yield from map(encoder, batches)
        return
    # A process that is forked after the tokenizer has used its threads can hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_become_worker, initargs=(encoder,)) as pool:
        waiting: list[Future[Encoded]] = [
            pool.submit(_encode, batch) for batch in islice(batches, WAITING_BATCHES * workers)
        ]
        while waiting:
            yield waiting.pop(0).result()
            waiting += [pool.submit(_encode, batch) for batch in islice(batches, 1)]


_encoder: Encoder


def _become_worker(encoder: Encoder) -> None:
    """Keeps the encoder of this worker; each worker has one core, and ends with the process that started it."""
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = encoder
    ignore_signals(0)  # which go to all processes of a run at once; the one that started it decides
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    """Ends this process when `parent` has ended, perhaps killed, and nobody is left to ask for tokens."""
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    os._exit(1)


def _encode(texts: list[str]) -> Encoded:
    return _encoder(texts)


def _bytes_of(name: str, written: Written) -> int:
    """The size of a file when so much is written."""
    return {TOKENS: 4 * written.tokens, TARGETS: written.tokens, LENGTHS: 8 * written.documents}[name]


def _open_at(path: Path, size: int) -> BinaryIO:
    """Opens a file for appending after its first `size` bytes; what stood behind them is dropped."""
    path.touch()
    file = path.open("r+b")
    file.truncate(size)
    file.seek(size)
    return file


def _note(folder: Path, files: Any, written: Written) -> None:
    """Stores how much is written, once it is on disk."""
    for file in files:
        file.flush()
        os.fsync(file.fileno())
    write_json(folder / NOTE, asdict(written))


def _read_note(folder: Path) -> Written:
    """How much an interrupted call has left, all of which is on disk."""
    try:
        written = Written(**json.loads((folder / NOTE).read_text()))
    except (OSError, ValueError, TypeError):
        return Written()
    sizes = {name: _bytes_of(name, written) for name in (TOKENS, LENGTHS)}
    whole = all((folder / name).exists() and (folder / name).stat().st_size >= sizes[name] for name in sizes)
    return written if whole else Written()


def _finish(folder: Path, written: Written, identity: dict[str, str]) -> None:
    """Turns the lengths of the documents into their starts, and removes what only an unfinished stream needs."""
    lengths: NDArray[np.int64] = np.fromfile(folder / LENGTHS, dtype=np.int64)
    np.save(folder / STARTS, np.cumsum(lengths) - lengths)
    flush(folder / TOKENS)
    write_json(folder / STREAM, {"text_bytes": written.text_bytes, **identity})
    for name in (LENGTHS, NOTE):
        (folder / name).unlink(missing_ok=True)


def decoded_bytes(tokenizer: PreTrainedTokenizerBase, tokens: NDArray[Any]) -> int:
    """Length in UTF-8 of the text that `tokens` spell, special tokens excluded."""
    text = str(tokenizer.decode(tokens.tolist(), skip_special_tokens=True))
    return len(text.encode("utf-8", "surrogatepass"))
