"""Documents that share the first token of their sequence (AnchorAttention, arXiv 2411.13476)."""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dynattn.modeling.ops.chunked_loss import IGNORED

from ...common.errors import UserError
from .packing import PackedSequences
from .sequences import Sequences
from .token_stream import TokenStream


class AnchoredSequences(Sequences):
    """Windows of a token stream, each behind an anchor: a start token that all documents of the window share.

    Each document of the stream begins with a start token. In a window these tokens have position 0, and attention stays
    inside documents. So each of them sees only itself, at position 0, and has the same hidden states as the anchor:
    attention to a document's own start token is attention to the shared anchor. All other tokens have their places in
    the sequence as positions.

    Nothing is predicted from the anchor, because a start token or the middle of a document follows it.
    """

    def __init__(self, stream: TokenStream, name: str, length: int, *, anchor: int, pad: int, score_all: bool) -> None:
        """Puts `anchor`, the start token, in front of windows of `length - 1` tokens.

        Raises:
            UserError: a document of the stream does not begin with `anchor`; the message calls the stream `name`.
        """
        others = np.flatnonzero(stream.tokens[stream.starts] != anchor)
        if len(others):
            raise UserError(
                f"packing=anchor shares the start token {anchor}, and document {others[0]} of {name} begins with token "
                f"{stream.tokens[stream.starts[others[0]]]}; choose another packing"
            )
        self.windows = PackedSequences(stream, length - 1, pad=pad, mask_documents=False, score_all=score_all)
        self.length, self.anchor, self.text_bytes = length, anchor, stream.text_bytes

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Sequence `index`: `input_ids`, `labels` and `position_ids`, each `[T]`."""
        window = self.windows[index]
        input_ids = pad(window["input_ids"], (1, 0), value=self.anchor)
        labels = pad(window["labels"], (1, 0), value=IGNORED)
        labels[1] = IGNORED
        begin = index * self.windows.stride
        position_ids = torch.arange(self.length)
        position_ids[1 + self.windows.stream.starts_between(begin, begin + self.length - 1)] = 0
        return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}

    def documents(self, index: int) -> list[str]:
        return self.windows.documents(index)

    def describe(self) -> str:
        return f"{self.windows.describe()}, each behind an anchor"
