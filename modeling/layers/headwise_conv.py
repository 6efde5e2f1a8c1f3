"""The causal depthwise convolution after a projection, one kernel for each channel of a head, shared by all heads."""

import torch
from torch import Tensor, nn
from transformers import initialization as init


class HeadwiseCausalConv(nn.Module):
    """`y[t] = bias + sum_i weight[i] * x[t - i]` over the channels of every head (RCMHA; Primer's MDHA).

    Weights:
        weight: `[W, D]`, row `i` for the token `i` places back.
        bias: `[D]`.
    """

    def __init__(self, head_dim: int, kernel_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(kernel_size, head_dim))
        self.bias = nn.Parameter(torch.empty(head_dim))

    @property
    def context(self) -> int:
        """Earlier rows that the first output needs."""
        return self.weight.shape[0] - 1

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Convolves the last `T` rows of `x`.

        Args:
            x: `[B, context + T, H, D]`; the context of a sequence's beginning is zeros.
            position_ids: `[B, T]` or `[1, T]`: rows before position 0 belong to another document and count as zeros.

        Returns:
            `[B, T, H, D]`.
        """
        length = x.shape[1] - self.context
        output = torch.addcmul(self.bias, x[:, self.context :], self.weight[0])
        for back in range(1, self.context + 1):
            earlier = x[:, self.context - back : self.context - back + length]
            if position_ids is not None:
                earlier = earlier * (position_ids >= back)[:, :, None, None]
            output = torch.addcmul(output, earlier, self.weight[back])
        return output

    def extra_repr(self) -> str:
        return f"kernel_size={self.weight.shape[0]}, head_dim={self.weight.shape[1]}"


@torch.no_grad()
def init_conv(module: HeadwiseCausalConv, std: float) -> None:
    """Starts near the identity: the token itself with weight 1, and noise on all weights so that none is the same."""
    weight = torch.empty_like(module.weight).normal_(std=std)
    weight[0] += 1
    init.copy_(module.weight, weight)
    init.zeros_(module.bias)
