"""Turns documents into tokens, in several processes if asked to, and continues where an interrupted run stopped."""

import json
import logging
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
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
from ...common.workers import end_with_parent, submit
from ..stopping import ignore_signals
from .documents import iterate_texts
from .text_encoder import Encoded, TextEncoder
from .token_stream import STARTS, STREAM, TARGETS, TOKENS

logger = logging.getLogger(__name__)

# After each such number of documents the file `NOTE` is updated, which says how much of the stream is on disk.
NOTE_DOCUMENTS = 50_000
LENGTHS, NOTE = "lengths.bin", "written.json"
# Batches that are submitted for each worker: enough that none is idle, and few enough to hold in memory.
WAITING_BATCHES = 3


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
    dataset: Dataset, encoder: TextEncoder, folder: Path, workers: int = 0, identity: dict[str, str] | None = None
) -> None:
    """Tokenizes the column `text` of `dataset` into `folder`, and continues where an interrupted call stopped.

    Args:
        workers: processes that tokenize; with 0 this process does, on all cores if the tokenizer can use them.
        identity: what the stream is made from; it is stored in the stream's description.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = [TOKENS, LENGTHS, *([TARGETS] if encoder.marks_targets else [])]
    written = _read_note(folder, names)
    started, before = time.perf_counter(), written.tokens
    with ExitStack() as stack:
        files = {name: stack.enter_context(_open_at(folder / name, _bytes_of(name, written))) for name in names}
        bar = stack.enter_context(tqdm(initial=written.tokens, unit=" tokens", unit_scale=True, desc="tokenizing"))
        rest = dataset.select(range(written.documents, len(dataset)))
        noted = written.documents
        for batch in encode_batches(iterate_texts(rest), encoder, workers):
            columns: dict[str, Any] = {TOKENS: batch.tokens, LENGTHS: batch.lengths, TARGETS: batch.targets}
            for name, file in files.items():
                file.write(columns[name].tobytes())
            written.add(batch)
            bar.update(len(batch.tokens))
            if written.documents - noted >= NOTE_DOCUMENTS:
                _note(folder, files.values(), written)
                noted = written.documents
    _finish(folder, written, identity or {})
    seconds = time.perf_counter() - started
    logger.info("%d tokens in %.0f s, %.0f a second", written.tokens, seconds, (written.tokens - before) / seconds)


def encode_batches(batches: Iterator[list[str]], encoder: TextEncoder, workers: int) -> Iterator[Encoded]:
    """Batches of documents as tokens, in order; `workers` processes make them, or this one if 0.

    With workers, up to `WAITING_BATCHES` batches for each of them are read ahead.
    """
    if workers == 0:
        yield from map(encoder, batches)
        return
    # A process that is forked after the tokenizer has used its threads can hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_become_worker, initargs=(encoder,)) as pool:
        waiting = [submit(pool, _encode, batch) for batch in islice(batches, WAITING_BATCHES * workers)]
        while waiting:
            yield waiting.pop(0).result()
            waiting += [submit(pool, _encode, batch) for batch in islice(batches, 1)]


_encoder: TextEncoder


def _become_worker(encoder: TextEncoder) -> None:
    """Prepares a worker: it keeps the encoder, uses one core, and ends when the process that started it ends."""
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = encoder
    ignore_signals()  # a signal reaches all processes of a run; the process that started this one decides
    end_with_parent()


def _encode(texts: list[str]) -> Encoded:
    return _encoder(texts)


def _bytes_of(name: str, written: Written) -> int:
    """The size in bytes that the file `name` has when `written` is on disk."""
    return {TOKENS: 4 * written.tokens, TARGETS: written.tokens, LENGTHS: 8 * written.documents}[name]


def _open_at(path: Path, size: int) -> BinaryIO:
    """Opens a file for appending after its first `size` bytes; later bytes are deleted."""
    path.touch()
    file = path.open("r+b")
    file.truncate(size)
    file.seek(size)
    return file


def _note(folder: Path, files: Any, written: Written) -> None:
    """Flushes the files to disk, and then stores how much is written."""
    for file in files:
        file.flush()
        os.fsync(file.fileno())
    write_json(folder / NOTE, asdict(written))


def _read_note(folder: Path, names: Sequence[str]) -> Written:
    """How much an interrupted call has written to disk; nothing if its note or a file is missing or too short.

    Args:
        names: the files.
    """
    try:
        written = Written(**json.loads((folder / NOTE).read_text()))
    except (OSError, ValueError, TypeError):
        return Written()
    sizes = {name: _bytes_of(name, written) for name in names}
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
