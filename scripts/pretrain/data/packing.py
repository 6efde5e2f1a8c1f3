"""Documents become one stream of tokens on disk, and the stream becomes sequences of one length.

A document is written as `start tokens end` (`start` is the tokenizer's bos, or its eos). The start token gives the
first real token something to be predicted from; it is never a target itself, and every token of the text is one.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from ...common.atomic_file import write_json
from ...common.token_streams import IGNORE_INDEX, TokenStreams
from .tokenizer import start_token_id

# Tokenizing a text takes many times its size in memory, so a long document is tokenized in parts.
MAX_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class TokenStream:
    """The tokens of all documents end to end.

    Attributes:
        tokens: `[N]` token ids.
        starts: `[documents]` index of each document's start token, ascending from 0.
        text_bytes: length of the text in UTF-8, without start and end tokens.
    """

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    text_bytes: int

    @classmethod
    def open(cls, folder: Path) -> "TokenStream":
        """Opens what `write_stream` stored; the tokens stay on disk until they are read."""
        text_bytes = json.loads((folder / "stream.json").read_text())["text_bytes"]
        # torch warns of arrays that are read-only. Mode "c" (copy on write) makes this one writable, not its file.
        tokens: NDArray[np.int32] = np.memmap(folder / "tokens.bin", dtype=np.int32, mode="c")
        return cls(tokens, np.load(folder / "starts.npy"), text_bytes)

    def starts_between(self, begin: int, end: int) -> NDArray[np.int64]:
        """Where documents start among the tokens from `begin` to before `end`, counted from `begin`."""
        first, last = np.searchsorted(self.starts, (begin, end))
        return self.starts[first:last] - begin


def write_stream(batches: Iterable[list[str]], tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Tokenizes batches of documents into a new folder; one batch is in memory at a time."""
    folder.mkdir(parents=True)
    lengths: list[int] = []
    text_bytes = 0
    with (folder / "tokens.bin").open("wb") as file:
        for texts in batches:
            documents = tokenize(texts, tokenizer)
            file.write(np.concatenate(documents).tobytes())
            lengths += [len(document) for document in documents]
            text_bytes += sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    np.save(folder / "starts.npy", starts)
    write_json(folder / "stream.json", {"text_bytes": text_bytes})


def tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[NDArray[np.int32]]:
    """Returns `start tokens end` for each document."""
    parts = [list(split_long(text)) for text in texts]
    flat = tokenizer([part for document in parts for part in document], add_special_tokens=False, verbose=False)
    encoded = iter(flat["input_ids"])
    start, end = [start_token_id(tokenizer)], [tokenizer.eos_token_id]
    return [np.concatenate([start, *(next(encoded) for _ in document), end]).astype(np.int32) for document in parts]


def split_long(text: str, limit: int = MAX_CHARACTERS) -> Iterator[str]:
    """Yields the text in parts of at most `limit` characters, cut after a line where there is one."""
    begin = 0
    while len(text) - begin > limit:
        line_end = text.rfind("\n", begin, begin + limit)
        end = begin + limit if line_end < 0 else line_end + 1
        yield text[begin:end]
        begin = end
    yield text[begin:]


class PackedSequences(Dataset[dict[str, Tensor]]):
    """Fixed-length windows of a token stream.

    Training windows (`score_all=False`) lie side by side and the incomplete last one is dropped: every token is read
    once. Validation windows (`score_all=True`) share one token with the window before and the last one is padded: every
    token is a target exactly once.

    Each item holds `input_ids` and `labels`, both `[T]`; the model shifts the labels, as Transformers does. With
    `mask_documents` it also holds `position_ids` `[T]` that restart with each document, from which Transformers derives
    block-diagonal attention as long as no attention mask is given.
    """

    def __init__(self, stream: TokenStream, length: int, *, pad: int, mask_documents: bool, score_all: bool) -> None:
        self.stream, self.length, self.pad, self.mask_documents = stream, length, pad, mask_documents
        tokens = len(stream.tokens)
        self.stride = length - 1 if score_all else length
        self.count = -(-(tokens - 1) // self.stride) if score_all else tokens // length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Window `index`: `input_ids`, `labels` and perhaps `position_ids`, each `[T]`."""
        if not 0 <= index < self.count:
            raise IndexError(index)
        begin = index * self.stride
        input_ids = np.asarray(self.stream.tokens[begin : begin + self.length], dtype=np.int64)
        labels = input_ids.copy()
        starts = self.stream.starts_between(begin, begin + self.length)
        labels[starts] = IGNORE_INDEX
        padding = (0, self.length - len(input_ids))
        item: dict[str, NDArray[Any]] = {
            "input_ids": np.pad(input_ids, padding, constant_values=self.pad),
            "labels": np.pad(labels, padding, constant_values=IGNORE_INDEX),
        }
        if self.mask_documents:
            item["position_ids"] = restarting_positions(starts, self.length)
        return {name: torch.from_numpy(values) for name, values in item.items()}

    @property
    def unused_tokens(self) -> int:
        """Tokens at the end of the stream that no window holds."""
        return max(0, len(self.stream.tokens) - (self.count - 1) * self.stride - self.length)

    def share(self, process: int, processes: int, batch_size: int) -> Iterator[Sequence[int]]:
        """The indices of one process's batches, so that all processes together read every sequence once."""
        indices = range(process, self.count, processes)
        for begin in range(0, len(indices), batch_size):
            yield indices[begin : begin + batch_size]


class StreamSegments(Dataset[dict[str, Tensor]]):
    """A token stream as contiguous parts that are read side by side, for a model that remembers what it has read.

    Item `segment * parts + part` is one segment of one part, so that `parts` items in a row are the same segment of all
    parts. Each item holds `input_ids` `[T]`, and the next tokens `[T]` as `labels` and as `shift_labels`, which the
    model does not shift: the last token of a segment predicts the first one of the next segment. Every token is a
    target once, except for start tokens, the first token of the stream and up to `parts - 1` tokens at its end. The
    last segment of a part is padded.
    """

    def __init__(self, stream: TokenStream, length: int, *, parts: int, pad: int) -> None:
        self.stream, self.length, self.parts, self.pad = stream, length, parts, pad
        self.cut = TokenStreams.cut(torch.from_numpy(stream.tokens), parts, length)

    def __len__(self) -> int:
        return len(self.cut) * self.parts

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Item `index`: `input_ids`, `labels` and `shift_labels`, each `[T]`."""
        segment, part = divmod(index, self.parts)
        input_ids, targets = (side[part].long() for side in self.cut[segment])
        begin = part * self.cut.inputs.shape[1] + segment * self.length + 1
        targets[self.stream.starts_between(begin, begin + len(targets))] = IGNORE_INDEX
        padding = (0, self.length - len(input_ids))
        targets = nn.functional.pad(targets, padding, value=IGNORE_INDEX)
        input_ids = nn.functional.pad(input_ids, padding, value=self.pad)
        return {"input_ids": input_ids, "labels": targets, "shift_labels": targets}

    @property
    def unused_tokens(self) -> int:
        """Tokens at the end of the stream that are neither read nor predicted."""
        return len(self.stream.tokens) - self.cut.inputs.numel() - 1

    def share(self, process: int, processes: int, batch_size: int) -> Iterator[Sequence[int]]:
        """The indices of all segments in order, all for the first process: each continues the one before."""
        if process == 0:
            yield from (range(begin, begin + self.parts) for begin in range(0, len(self), self.parts))


Sequences = PackedSequences | StreamSegments


def restarting_positions(starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Positions `[length]` that count from 0 and restart at each of `starts`."""
    origin = np.zeros(length, dtype=np.int64)
    origin[starts] = starts
    return np.arange(length) - np.maximum.accumulate(origin)
