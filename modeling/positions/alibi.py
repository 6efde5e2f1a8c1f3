"""The position bias of attention with linear biases (ALiBi, arXiv 2108.12409)."""

import torch
from torch import Tensor


def alibi_bias(length: int, heads: int, device: torch.device) -> Tensor:
    """The bias of each head by distance, float32 `[length, H]`.

    The paper's code adds the slope times the index of the key instead. The difference is a constant for each query and
    head, which the softmax cancels, but a composition before the softmax does not.
    """
    distance = torch.arange(length, device=device, dtype=torch.float32)
    return -distance[:, None] * alibi_slopes(heads, device)


def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """The slope of each head, float32 `[H]`.

    For `P` heads, a power of two, the slope of head `h` is `2 ** (-8 (h + 1) / P)`. Other numbers of heads take the
    slopes of the next smaller power of two, then every other slope of twice that power, as in the paper's code.
    """
    power = 1 << (heads.bit_length() - 1)
    first = torch.arange(1, power + 1, device=device, dtype=torch.float32) / power
    others = (2 * torch.arange(heads - power, device=device, dtype=torch.float32) + 1) / (2 * power)
    return 2.0 ** (-8 * torch.cat([first, others]))
