"""Documents that share the first token of their sequence (AnchorAttention, arXiv 2411.13476)."""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ...common.errors import UserError
from ...common.token_streams import IGNORE_INDEX
from .packing import PackedSequences
from .sequences import Sequences
from .token_stream import TokenStream


class AnchoredSequences(Sequences):
    """Windows of a token stream behind an anchor, which all documents in them see.

    Each document of the stream begins with a start token. That of a document inside a window is a copy of the anchor:
    it sees itself alone and stands at position 0, so it has the hidden states of the anchor, and attention that is kept
    inside documents is attention to one shared token. All other tokens stand at their places in the sequence.

    A window that begins inside a document predicts nothing from the anchor.
    """

    def __init__(self, stream: TokenStream, name: str, length: int, *, anchor: int, pad: int, score_all: bool) -> None:
        """Puts `anchor`, the start token, in front of windows of `length - 1` tokens.

        Raises:
            UserError: a document of the stream, which is called `name`, does not begin with it.
        """
        others = np.flatnonzero(stream.tokens[stream.starts] != anchor)
        if len(others):
            raise UserError(
                f"packing=anchor shares the start token {anchor}, and document {others[0]} of {name} begins with token "
                f"{stream.tokens[stream.starts[others[0]]]}; choose another packing"
            )
        self.windows = PackedSequences(stream, length - 1, pad=pad, mask_documents=False, score_all=score_all)
        self.length, self.anchor = length, anchor

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Sequence `index`: `input_ids`, `labels` and `position_ids`, each `[T]`."""
        window = self.windows[index]
        input_ids = pad(window["input_ids"], (1, 0), value=self.anchor)
        labels = pad(window["labels"], (1, 0), value=IGNORE_INDEX)
        labels[1] = IGNORE_INDEX
        begin = index * self.windows.stride
        position_ids = torch.arange(self.length)
        position_ids[1 + self.windows.stream.starts_between(begin, begin + self.length - 1)] = 0
        return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}

    def documents(self, index: int) -> list[str]:
        return self.windows.documents(index)

    def describe(self) -> str:
        return f"{self.windows.describe()}, each behind an anchor"

    @property
    def text_bytes(self) -> int:
        return self.windows.text_bytes
