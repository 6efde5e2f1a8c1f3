"""Absolute positions, which are added to token embeddings: learned ones and sinusoids; and how far they reach."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

# Types of Transformers that count positions from the number behind that of the padding token, as RoBERTa does.
BEHIND_PADDING = frozenset({
    "camembert", "data2vec-text", "ibert", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm",
    "xlm-roberta", "xlm-roberta-xl", "xmod",
})  # fmt: skip


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


def context_length(config: Any) -> int | None:
    """How many tokens a model is made to read, or its decoder, if it has other parts; None if nothing says so."""
    config = config.get_text_config(decoder=True)
    positions: int | None = getattr(config, "max_position_embeddings", None)
    if positions is None or config.model_type not in BEHIND_PADDING:
        return positions
    return positions - config.pad_token_id - 1


def longest_readable(config: Any) -> int | None:
    """The most tokens that a model with this configuration can read; None if its position scheme sets no limit."""
    config = config.get_text_config(decoder=True)
    scheme = getattr(config, "position_scheme", None)
    unlimited = scheme != "learned" if scheme is not None else getattr(config, "rope_parameters", None) is not None
    # Tables of relative positions have a row for each distance in a window; without a window texts outgrow them.
    outgrows_tables = getattr(config, "is_relative", False) and config.sliding_window is None
    return context_length(config) if outgrows_tables or not unlimited else None
