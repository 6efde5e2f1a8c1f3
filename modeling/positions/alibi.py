"""The position bias of attention with linear biases (ALiBi, arXiv 2108.12409)."""

import torch
from torch import Tensor


def alibi_bias(length: int, like: Tensor) -> Tensor:
    """The bias of each head by distance, `[length, H]`, for queries `like` `[B, H, T, D]`, in their dtype.

    The slope of head `h` is `2 ** (-8 (h + 1) / H)`.
    """
    heads = like.shape[1]
    slopes = 2 ** (-8 * torch.arange(1, heads + 1, device=like.device, dtype=torch.float32) / heads)
    distance = torch.arange(length, device=like.device, dtype=torch.float32)
    return (-distance[:, None] * slopes).to(like.dtype)
