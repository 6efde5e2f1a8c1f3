"""Root mean square norm (arXiv 1910.07467), with statistics in at least float32."""

import torch
from torch import Tensor, nn

from ..ops.dtypes import at_least_float32


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """Divides `x` `[..., n]` by the root mean square of its last dimension, in the dtype of `x`.

    `eps` is added to the mean square.
    """
    wide = x.to(at_least_float32(x.dtype))
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


class RMSNorm(nn.Module):
    """`rms_normalize` times a learned scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the last dimension of `x` `[..., size]`."""
        return self.weight * rms_normalize(x, self.eps)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"
