"""Cuts a stream of tokens into sequences of one length: end to end, by best fit, or as streams for a memory."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dynattn.modeling.ops.chunked_loss import IGNORED

from ...common.parallel_streams import ParallelStreams
from .best_fit import Packs, pack_best_fit
from .sequences import Sequences, as_item, restarting_positions
from .token_stream import TokenStream


class PackedSequences(Sequences):
    """Fixed-length windows of a token stream.

    Training windows (`score_all=False`) lie side by side and the incomplete last one is dropped: every token is read
    once. Validation windows (`score_all=True`) share one token with the window before and the last one is padded: every
    token is a target exactly once. With `mask_documents` an item also holds `position_ids`.
    """

    def __init__(self, stream: TokenStream, length: int, *, pad: int, mask_documents: bool, score_all: bool) -> None:
        self.stream, self.length, self.pad, self.mask_documents = stream, length, pad, mask_documents
        self.text_bytes = stream.text_bytes
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
        input_ids, labels = self.stream.read(begin, begin + self.length)
        padding = (0, self.length - len(input_ids))
        item = {
            "input_ids": np.pad(input_ids, padding, constant_values=self.pad),
            "labels": np.pad(labels, padding, constant_values=IGNORED),
        }
        if self.mask_documents:
            starts = self.stream.starts_between(begin, begin + self.length)
            item["position_ids"] = restarting_positions(starts, self.length)
        return as_item(item)

    def documents(self, index: int) -> list[str]:
        begin = index * self.stride
        end = min(begin + self.length, len(self.stream.tokens))
        return [f"document {number}" for number in self.stream.documents_between(begin, end)]

    def describe(self) -> str:
        return f"{self.stream.describe()}, {self.count:,} sequences of {self.length}{_tell_rest(self.unused_tokens)}"

    @property
    def unused_tokens(self) -> int:
        """Tokens at the end of the stream that no window holds."""
        return max(0, len(self.stream.tokens) - (self.count - 1) * self.stride - self.length)


class BestFitSequences(Sequences):
    """Documents, whole where they fit, packed so that few of them are cut (Ding et al., arXiv 2404.10830).

    A document that is longer than a sequence is cut into whole sequences and a rest. Room at the end of a sequence that
    no piece fits in is padded. The first token of a piece is no target, because the tokens before it are of another
    document, or in another sequence.
    """

    def __init__(self, stream: TokenStream, length: int, *, pad: int, mask_documents: bool) -> None:
        self.stream, self.length, self.pad, self.mask_documents = stream, length, pad, mask_documents
        self.packs: Packs = pack_best_fit(stream.lengths, length)
        self.begins: NDArray[np.int64] = stream.starts[self.packs.document] + self.packs.offset

    def __len__(self) -> int:
        return len(self.packs.first) - 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Sequence `index`: `input_ids`, `labels` and perhaps `position_ids`, each `[T]`."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        input_ids = np.full(self.length, self.pad, dtype=np.int64)
        labels = np.full(self.length, IGNORED, dtype=np.int64)
        starts, place = [], 0
        for piece in self.packs.pieces(index):
            begin, size = int(self.begins[piece]), int(self.packs.size[piece])
            span = slice(place, place + size)
            input_ids[span], labels[span] = self.stream.read(begin, begin + size)
            labels[place] = IGNORED
            starts.append(place)
            place += size
        item = {"input_ids": input_ids, "labels": labels}
        if self.mask_documents:
            # Padding counts as a document of its own, apart from the last one.
            edges = starts if place == self.length else [*starts, place]
            item["position_ids"] = restarting_positions(np.array(edges, dtype=np.int64), self.length)
        return as_item(item)

    def documents(self, index: int) -> list[str]:
        return [f"document {self.packs.document[piece]}" for piece in self.packs.pieces(index)]

    def describe(self) -> str:
        places = len(self) * self.length
        padding = places - int(self.packs.size.sum())
        return (
            f"{self.stream.describe()}, {len(self):,} sequences of {self.length} by best fit "
            f"({self.packs.cut:,} documents cut, {padding / places:.2%} padding)"
        )


class StreamSegments(Sequences):
    """A token stream as contiguous parts that are read side by side, for a model with memory.

    Item `segment * parts + part` is one segment of one part, so that `parts` items in a row are the same segment of all
    parts. Each item holds `input_ids` `[T]`, and the next tokens `[T]` as `labels` and as `shift_labels`, which the
    model does not shift: the last token of a segment predicts the first one of the next segment. Every token is a
    target once, except for start tokens, the first token of the stream and up to `parts - 1` tokens at its end. The
    last segment of a part is padded.
    """

    def __init__(self, stream: TokenStream, length: int, *, parts: int, pad: int) -> None:
        self.stream, self.length, self.parts, self.pad = stream, length, parts, pad
        self.text_bytes = stream.text_bytes
        self.cut = ParallelStreams.cut(torch.from_numpy(stream.tokens), parts, length)

    def __len__(self) -> int:
        return len(self.cut) * self.parts

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Item `index`: `input_ids`, `labels` and `shift_labels`, each `[T]`."""
        begin, end = self._span(index)
        input_ids = torch.from_numpy(np.asarray(self.stream.tokens[begin:end], dtype=np.int64))
        targets = torch.from_numpy(self.stream.read(begin + 1, end + 1)[1])
        padding = (0, self.length - len(input_ids))
        targets = nn.functional.pad(targets, padding, value=IGNORED)
        input_ids = nn.functional.pad(input_ids, padding, value=self.pad)
        return {"input_ids": input_ids, "labels": targets, "shift_labels": targets}

    def documents(self, index: int) -> list[str]:
        return [f"document {number}" for number in self.stream.documents_between(*self._span(index))]

    def describe(self) -> str:
        return (
            f"{self.stream.describe()}, {len(self):,} segments of {self.length} in {self.parts} streams"
            f"{_tell_rest(self.unused_tokens)}"
        )

    @property
    def unused_tokens(self) -> int:
        """Tokens at the end of the stream that are neither read nor predicted."""
        return len(self.stream.tokens) - self.cut.inputs.numel() - 1

    def share(self, process: int, processes: int, batch_size: int) -> Iterator[Sequence[int]]:
        """All segments in order for the first process, because each continues the one before; none for the others."""
        if process == 0:
            yield from (range(begin, begin + self.parts) for begin in range(0, len(self), self.parts))

    def _span(self, index: int) -> tuple[int, int]:
        """Where the inputs of item `index` begin and end in the stream."""
        segment, part = divmod(index, self.parts)
        width = self.cut.inputs.shape[1]
        begin = part * width + segment * self.length
        return begin, min(begin + self.length, (part + 1) * width)


def _tell_rest(unused_tokens: int) -> str:
    """Says, in brackets, how many tokens are left out; empty where all are read."""
    if unused_tokens == 1:
        return " (1 token at the end fills none and is left out)"
    return f" ({unused_tokens} tokens at the end fill none and are left out)" if unused_tokens else ""
