"""A moving average of the weights, which is kept beside them, saved with them, and scored."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """The exponential moving average of a model's weights, in shards where they are.

    In the first updates it forgets faster, so that it is not an average of initial weights: of update `n`, counted from
    0, it takes at least `9 / (10 + n)`.

    Attributes:
        tensors: the average of each weight by its name.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.tensors: dict[str, Tensor] = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Takes in the weights that update `step`, counted from 0, has made."""
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
