"""All documents of a source as one stream of tokens on disk.

A document of text is written as `start tokens end` (`start` is the tokenizer's bos, or its eos). The start token gives
the first real token something to be predicted from; it is never a target itself, and every token of the text is one.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynattn.modeling.ops.chunked_loss import IGNORED

TOKENS, TARGETS, STARTS, STREAM = "tokens.bin", "targets.bin", "starts.npy", "stream.json"


@dataclass(frozen=True)
class TokenStream:
    """The tokens of all documents end to end.

    Attributes:
        tokens: `[N]` token ids.
        starts: `[documents]` index of each document's first token, ascending from 0; that token is never a target.
        text_bytes: length in UTF-8 of the text that the targets spell.
        targets: `[N]`, which tokens the model learns to predict; None means all but the starts.
    """

    tokens: NDArray[Any]
    starts: NDArray[np.int64]
    text_bytes: int
    targets: NDArray[np.bool_] | None = None

    @classmethod
    def open(cls, folder: Path) -> "TokenStream":
        """Opens what `tokenization.write_stream` stored; the tokens stay on disk until they are read."""
        text_bytes = json.loads((folder / STREAM).read_text())["text_bytes"]
        # torch warns of arrays that are read-only. Mode "c" (copy on write) makes this one writable, not its file.
        tokens: NDArray[np.int32] = np.memmap(folder / TOKENS, dtype=np.int32, mode="c")
        masked = (folder / TARGETS).exists()
        targets: NDArray[np.bool_] | None = np.memmap(folder / TARGETS, dtype=np.bool_, mode="c") if masked else None
        return cls(tokens, np.load(folder / STARTS), text_bytes, targets)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """`[documents]` tokens of each document."""
        return np.diff(self.starts, append=len(self.tokens))

    def starts_between(self, begin: int, end: int) -> NDArray[np.int64]:
        """Where documents start among the tokens from `begin` to before `end`, counted from `begin`."""
        first, last = np.searchsorted(self.starts, (begin, end))
        return self.starts[first:last] - begin

    def documents_between(self, begin: int, end: int) -> range:
        """The numbers of the documents of which some token lies from `begin` to before `end`."""
        first, last = np.searchsorted(self.starts, (begin, end - 1), side="right")
        return range(int(first) - 1, int(last))

    def read(self, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens and labels `[n]` from `begin` to before `end`; labels are `IGNORED` but at targets."""
        tokens = np.asarray(self.tokens[begin:end], dtype=np.int64)
        labels = tokens.copy()
        labels[self.starts_between(begin, end)] = IGNORED
        if self.targets is not None:
            labels[~self.targets[begin:end]] = IGNORED
        return tokens, labels

    def scored(self) -> NDArray[np.int64]:
        """All targets, `[targets]`."""
        _, labels = self.read(0, len(self.tokens))
        return labels[labels != IGNORED]

    def describe(self) -> str:
        """The size of the stream, for the terminal."""
        size = f"{len(self.starts):,} documents, {len(self.tokens):,} tokens"
        if self.targets is None:
            return size
        count = int(np.count_nonzero(self.targets))
        return f"{size}, {count:,} of them ({count / len(self.tokens):.1%}) targets"
