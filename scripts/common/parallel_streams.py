"""One long text as contiguous streams, read segment by segment: what a model with memory is trained and scored on."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ParallelStreams:
    """`B` streams side by side; segment `i` of a stream continues its segment `i - 1` (Transformer-XL).

    Indexing and iteration give the segments in order, each as inputs and targets `[B, T]`, where `T` is `segment`, or
    less in the last one.

    Attributes:
        inputs, targets: `[B, L]`; a target is the token after its input.
        segment: tokens of a segment.
    """

    inputs: Tensor
    targets: Tensor
    segment: int

    @classmethod
    def cut(cls, tokens: Tensor, streams: int, segment: int) -> "ParallelStreams":
        """Cuts `tokens` `[N]` into `B` equal streams.

        Every token but the first is a target once, except for up to `B - 1` tokens at the end that fill no stream.

        Raises:
            ValueError: `streams` or `segment` is not positive, or there are too few tokens for so many streams.
        """
        if streams < 1 or segment < 1:
            raise ValueError(f"streams ({streams}) and segment ({segment}) must be positive")
        length = (len(tokens) - 1) // streams
        if length < 1:
            raise ValueError(f"{len(tokens)} tokens are too few for {streams} streams; each needs two or more")
        used = streams * length
        return cls(tokens[:used].view(streams, length), tokens[1 : used + 1].view(streams, length), segment)

    def __len__(self) -> int:
        """Number of segments in each stream."""
        return -(-self.inputs.shape[1] // self.segment)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets `[B, T]` of each segment in turn."""
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets `[B, T]` of segment `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"segment {index} of {len(self)}")
        part = slice(index * self.segment, (index + 1) * self.segment)
        return self.inputs[:, part], self.targets[:, part]
