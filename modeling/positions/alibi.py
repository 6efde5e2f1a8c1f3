"""The position bias of attention with linear biases (ALiBi, arXiv 2108.12409)."""

import torch
from torch import Tensor


def alibi_bias(length: int, like: Tensor) -> Tensor:
    """The bias of each head by distance, `[length, H]`, for queries `like` `[B, H, T, D]`, in their dtype."""
    distance = torch.arange(length, device=like.device, dtype=torch.float32)
    return (-distance[:, None] * alibi_slopes(like.shape[1], like.device)).to(like.dtype)


def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """The slope of each head, float32 `[H]`.

    For `P` heads, a power of two, the slope of head `h` is `2 ** (-8 (h + 1) / P)`. Other numbers of heads take the
    slopes of the next smaller power of two, then every other slope of twice that power, as in the paper's code.
    """
    power = 1 << (heads.bit_length() - 1)
    first = torch.arange(1, power + 1, device=device) / power
    others = (2 * torch.arange(heads - power, device=device) + 1) / (2 * power)
    return 2.0 ** (-8 * torch.cat([first, others]))
