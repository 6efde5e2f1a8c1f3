"""The causal depthwise convolution that RCMHA and MDHA put after a projection; all heads share its kernels."""

import torch
from torch import Tensor, nn
from transformers import initialization as init


class HeadwiseCausalConv(nn.Module):
    """`y[t] = bias + sum_i weight[i] * x[t - i]` for each channel of every head.

    RCMHA (arXiv 2308.03429) takes it from Primer's multi-dconv-head attention, MDHA (arXiv 2109.08668).

    Weights:
        weight: `[kernel_size, D]`, `weight[i]` for the token `i` places back.
        bias: `[D]`.
    """

    def __init__(self, head_dim: int, kernel_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(kernel_size, head_dim))
        self.bias = nn.Parameter(torch.empty(head_dim))

    @property
    def context_length(self) -> int:
        """Earlier tokens that the first output needs."""
        return self.weight.shape[0] - 1

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Convolves the last `T` tokens of `x`.

        Args:
            x: `[B, context_length + T, H, D]`; at the beginning of a sequence the context is zeros.
            position_ids: `[B, T]` or `[1, T]`: tokens before position 0 belong to another document and count as zeros.

        Returns:
            `[B, T, H, D]`.
        """
        length = x.shape[1] - self.context_length
        output = torch.addcmul(self.bias, x[:, self.context_length :], self.weight[0])
        for back in range(1, self.context_length + 1):
            earlier = x[:, self.context_length - back : self.context_length - back + length]
            if position_ids is not None:
                earlier = earlier * (position_ids >= back)[:, :, None, None]
            output = torch.addcmul(output, earlier, self.weight[back])
        return output

    def extra_repr(self) -> str:
        return f"kernel_size={self.weight.shape[0]}, head_dim={self.weight.shape[1]}"


@torch.no_grad()
def init_conv(module: HeadwiseCausalConv, std: float) -> None:
    """Starts near the identity: weight 1 for the token itself, plus normal noise of deviation `std` on all weights."""
    weight = torch.empty_like(module.weight).normal_(std=std)
    weight[0] += 1
    init.copy_(module.weight, weight)
    init.zeros_(module.bias)
