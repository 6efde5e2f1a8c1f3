"""Batched matrix products with a scale, around an error of PyTorch."""

import torch
from torch import Tensor


def scaled_bmm(left: Tensor, right: Tensor, scaling: float = 1.0, *, out: Tensor | None = None) -> Tensor:
    """`left @ right * scaling`, scaled before it is rounded: `[b, i, k]` and `[b, k, j]` to `[b, i, j]`."""
    base = left.new_zeros(1) if out is None else out  # not read, because it counts with `beta=0`
    product = torch.baddbmm(base, left, right, beta=0, alpha=scaling or 1.0, out=out)
    # On a CPU PyTorch 2.13 leaves bfloat16 results unset for an `alpha` of zero.
    return product if scaling else product.mul_(scaling)
