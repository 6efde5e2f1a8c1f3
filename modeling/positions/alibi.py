"""Attention with linear biases (ALiBi, arXiv 2108.12409)."""

import torch
from torch import Tensor


def alibi_bias(length: int, like: Tensor) -> Tensor:
    """Linear biases by distance, `[length, H]`; the slope of head `h` is `2 ** (-8 (h + 1) / H)` (arXiv 2108.12409)."""
    heads = like.shape[1]
    slopes = 2 ** (-8 * torch.arange(1, heads + 1, device=like.device, dtype=torch.float32) / heads)
    distance = torch.arange(length, device=like.device, dtype=torch.float32)
    return (-distance[:, None] * slopes).to(like.dtype)
