"""Absolute positions that are added to token embeddings."""

import math

import torch
from torch import Tensor, nn
from transformers import initialization as init


class SinusoidalPositions(nn.Module):
    """A table of sines and cosines (arXiv 1706.03762), which is computed and not stored.

    Position `p` has `[sin(p w_0), sin(p w_1), ..., cos(p w_0), cos(p w_1), ...]` with `w_i = 10000 ** (-2 i / E)`.
    """

    table: Tensor

    def __init__(self, num_positions: int, hidden_size: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(num_positions, hidden_size), persistent=False)
        init_sinusoids(self)

    def forward(self, position_ids: Tensor) -> Tensor:
        """Returns `[B, T, E]` for positions `[B, T]`."""
        return self.table[position_ids]


@torch.no_grad()
def init_sinusoids(module: SinusoidalPositions) -> None:
    """Computes the table; Transformers allocates models without values and asks for all of them."""
    positions, width = module.table.shape
    frequencies = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10000.0) / width))
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    init.copy_(module.table, torch.cat([angles.sin(), angles.cos()], dim=-1))


class ScaledEmbedding(nn.Embedding):
    """Token embeddings times a constant."""

    def __init__(self, num_embeddings: int, hidden_size: int, padding_idx: int | None, scale: float) -> None:
        super().__init__(num_embeddings, hidden_size, padding_idx)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        """Returns `[B, T, E]` for tokens `[B, T]`."""
        return super().forward(input) * self.scale
