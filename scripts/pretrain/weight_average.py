"""A moving average of the weights, which is saved with them and has a validation loss of its own."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """The exponential moving average of a model's weights, sharded if they are.

    After update `n`, counted from 0, the new weights have the share `max(1 - decay, 9 / (10 + n))` in it. So it soon
    forgets the initial weights.

    Attributes:
        tensors: the average of each weight by its name.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.tensors: dict[str, Tensor] = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Adds the weights after update `step`, counted from 0, to the average."""
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        for name, weight in model.named_parameters():
            self.tensors[name].lerp_(weight, share)

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """The model has the averaged weights during the block, and its own again after it."""
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)

    @torch.no_grad()
    def _swap(self, model: nn.Module) -> None:
        for name, weight in model.named_parameters():
            own = weight.detach().clone()
            weight.copy_(self.tensors[name])
            self.tensors[name].copy_(own)
