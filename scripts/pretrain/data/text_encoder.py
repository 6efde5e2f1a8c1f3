"""How a text becomes tokens, between a start and an end token."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from ...common.special_tokens import start_token_id
from .tokenizer import fingerprint

# Tokenizing a text takes many times its size in memory, so a long document is tokenized in parts.
MAX_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Encoded:
    """A batch of documents end to end.

    Attributes:
        tokens: `[N]`.
        lengths: `[documents]`.
        text_bytes: length in UTF-8 of the text that the targets spell.
        targets: `[N]`, which tokens are targets; None if all are but the first of each document.
    """

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int64]
    text_bytes: int
    targets: NDArray[np.bool_] | None = None


class TextEncoder:
    """Turns a batch of documents into tokens: `start tokens end` for each text.

    Attributes:
        marks_targets: whether it says which tokens are targets.
    """

    marks_targets = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    @property
    def fingerprint(self) -> str:
        """A digest of everything that decides which tokens a document becomes."""
        return fingerprint(self.tokenizer)

    def __call__(self, documents: list[str]) -> Encoded:
        """Encodes one batch.

        Raises:
            UserError: a document cannot be encoded.
        """
        encoded = tokenize(documents, self.tokenizer)
        text_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in documents)
        return Encoded(np.concatenate(encoded), np.array([len(one) for one in encoded]), text_bytes)


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
