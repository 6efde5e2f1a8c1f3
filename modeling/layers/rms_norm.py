"""Root mean square norm (arXiv 1910.07467), with statistics in at least float32."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """Divides `x` `[..., n]` by the root mean square of its last dimension, and multiplies it by `weight` `[n]`.

    `eps` is added to the mean square. The result has the wider dtype of `x` and `weight`.
    """
    dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    # On GPUs PyTorch has a single kernel for this if both have the same dtype, and autocast may make it return float32.
    weight = None if weight is None else weight.to(dtype)
    return F.rms_norm(x.to(dtype), x.shape[-1:], weight, eps).to(dtype)


class RMSNorm(nn.RMSNorm):
    """`rms_norm` of the last dimension, with a learned scale."""

    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the last dimension of `x` `[..., size]`."""
        return rms_norm(x, self.eps, self.weight)
