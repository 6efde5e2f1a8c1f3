"""Images with their classes."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Generator, Tensor


class Images(NamedTuple):
    """Images and what they show.

    Attributes:
        pixels: `[N, 1, h, w]`, from -1 to 1.
        labels: `[N]`.
    """

    pixels: Tensor
    labels: Tensor

    def take(self, indices: Tensor) -> "Images":
        """Those at the `indices`."""
        return Images(self.pixels[indices], self.labels[indices])

    def batches(self, size: int, seed: int) -> Iterator["Images"]:
        """Batches without end: all images in a random order, then again in another, without what is left over."""
        random = Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self.labels), generator=random)
            yield from (self.take(part) for part in order.split(size) if len(part) == size)
