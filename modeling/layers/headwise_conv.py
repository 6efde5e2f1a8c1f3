"""The depthwise convolution that RCMHA and MDHA put after a projection; all heads share its kernels."""

import torch
from torch import Tensor, nn
from transformers import initialization as init


class HeadwiseConv(nn.Module):
    """`y[t] = bias + sum_i weight[i] * x[t - i + later]` for each channel of every head.

    RCMHA (arXiv 2308.03429) takes it from Primer's multi-dconv-head attention, MDHA (arXiv 2109.08668).

    Weights:
        weight: `[kernel_size, D]`, `weight[i]` for the token `i - later` places back.
        bias: `[D]`.
    """

    def __init__(self, head_dim: int, kernel_size: int, later: int = 0) -> None:
        """Allocates the weights; `init_conv` draws them. `later` of the `kernel_size` tokens follow an output's own."""
        super().__init__()
        self.later = later
        self.weight = nn.Parameter(torch.empty(kernel_size, head_dim))
        self.bias = nn.Parameter(torch.empty(head_dim))

    @property
    def context_length(self) -> int:
        """Number of tokens besides its own that an output depends on, later ones included."""
        return self.weight.shape[0] - 1

    def pad(self, x: Tensor) -> Tensor:
        """A whole sequence `[B, T, H * D]` with the zeros of `forward` around it, `[B, context_length + T, H * D]`."""
        return nn.functional.pad(x, (0, 0, self.context_length - self.later, self.later))

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Convolves `T` tokens, which are in `x` between the earlier and the `later` tokens that their outputs need.

        Args:
            x: `[B, context_length + T, H, D]`, with zeros before the beginning of a sequence and after its end.
            position_ids: `[B, T]` or `[1, T]`: tokens before position 0 belong to another document and count as zeros.
                Only for kernels without later tokens.

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
        return f"kernel_size={self.weight.shape[0]}, head_dim={self.weight.shape[1]}, later={self.later}"


@torch.no_grad()
def init_conv(module: HeadwiseConv, std: float) -> None:
    """Starts near the identity: weight 1 for the token itself, plus normal noise of standard deviation `std`."""
    weight = torch.empty_like(module.weight).normal_(std=std)
    weight[module.later] += 1
    init.copy_(module.weight, weight)
    init.zeros_(module.bias)
