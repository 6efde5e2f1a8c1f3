"""Absolute positions, which are added to token embeddings: learned ones and sinusoids, and checks of their range."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..ops.readable import is_readable


class SinusoidalTable(nn.Module):
    """A table of `sinusoids`, which is computed and not part of checkpoints."""

    table: Tensor

    def __init__(self, num_positions: int, hidden_size: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(num_positions, hidden_size), persistent=False)
        self.fill_buffers()

    @torch.no_grad()
    def fill_buffers(self) -> None:
        """Computes the table, also for a model that Transformers allocated without values and then initializes."""
        positions, width = self.table.shape
        init.copy_(self.table, sinusoids(torch.arange(positions), width))

    def forward(self, position_ids: Tensor) -> Tensor:
        """Returns `[B, T, E]` for positions `[B, T]`."""
        return self.table[position_ids]


class SinusoidalEmbedding(nn.Module):
    """`sinusoids` times a scale, computed for any positions in each call, without a table."""

    def __init__(self, hidden_size: int, scale: float) -> None:
        super().__init__()
        self.hidden_size, self.scale = hidden_size, scale

    def forward(self, position_ids: Tensor) -> Tensor:
        """Returns float32 `[B, T, E]` for positions `[B, T]`."""
        return self.scale * sinusoids(position_ids, self.hidden_size).float()


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Sines and cosines (arXiv 1706.03762) of `positions` of any shape, float64 `[..., width]`; `width` is even.

    Position `p` has `[sin(p w_0), sin(p w_1), ..., cos(p w_0), cos(p w_1), ...]` with `w_i = 10000 ** (-2 i / width)`.
    """
    pairs = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device)
    angles = positions[..., None] * torch.exp(pairs * (-math.log(10000.0) / width))
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def make_absolute(config: Any) -> nn.Module | None:
    """The module that maps positions `[B, T]` to `[B, T, E]` to add to embeddings; None if the scheme adds nothing."""
    if config.position_scheme == "learned":
        return nn.Embedding(config.max_position_embeddings, config.hidden_size)
    if config.position_scheme == "sinusoidal":
        scale = getattr(config, "position_scale", None)
        return SinusoidalEmbedding(config.hidden_size, config.initializer_range if scale is None else scale)
    return None


def check_learned_positions(length: int, past_tokens: int | None, position_ids: Tensor, limit: int) -> None:
    """Raises ValueError if a segment has positions `[B, T]` beyond the table of `limit` learned ones.

    Reading positions waits for the device. So in decoding they are read only once a token may be beyond the table, and
    only where `is_readable` allows it.

    Args:
        past_tokens: number of tokens before the segment; None where the segment cannot reach beyond the table.
    """
    if past_tokens is None or not is_readable(position_ids):
        return
    if (length == 1 and past_tokens < limit) or not position_ids.numel():
        return
    least, most = torch.stack(position_ids.aminmax()).tolist()
    if least < 0:
        raise ValueError(f"position_ids has {least}; learned positions count from 0")
    needed = most + 1
    if needed > limit:
        raise ValueError(
            f"a segment of {length} tokens after {past_tokens} others needs {needed} learned positions, "
            f"but there are max_position_embeddings ({limit}); start again without memory, or use another "
            "position_scheme"
        )


def check_position_range(position_ids: Tensor, limit: int) -> None:
    """Raises ValueError if positions `[.., S]` are not among the first `limit`, where values can be read."""
    if not is_readable(position_ids) or not position_ids.numel():
        return
    least, largest = (int(end) for end in position_ids.aminmax())
    if least < 0 or largest >= limit:
        raise ValueError(
            f"position_ids reach from {least} to {largest}, but must be at least 0 and smaller than "
            f"max_position_embeddings ({limit}); count from 0, or make a model with more"
        )
