"""Stochastic depth (arXiv 1603.09382): in training, some examples skip what a sublayer adds to their hidden states."""

from torch import Tensor, nn


class DropPath(nn.Module):
    """In training, sets a sublayer's output to zero for each example with probability `rate`, and scales the others."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, update: Tensor) -> Tensor:
        """Drops whole examples of `update` `[B, T, E]`."""
        if not self.training or self.rate == 0:
            return update
        kept = update.new_empty(update.shape[0], 1, 1).bernoulli_(1 - self.rate)
        return update * kept / (1 - self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"
