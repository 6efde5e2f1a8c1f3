"""Learned tables: one number for each head and distance, or bucket of distances, spread to tables `[L, H]`."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..ops.dtypes import at_least_float32


def t5_buckets(length: int, num_buckets: int, max_distance: int, device: torch.device) -> Tensor:
    """The bucket of each distance from 0 to `length - 1`, int64 `[length]`, in a decoder of T5 (arXiv 1910.10683).

    The first half of the buckets holds one distance each. The others grow by a constant factor, from there up to
    `max_distance`; all longer distances are in the last one. Numbers are float32 and calculated in the order of T5,
    because their rounding decides about distances at the borders.
    """
    distance = torch.arange(length, device=device)
    exact = num_buckets // 2
    share = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    beyond = exact + (share * (num_buckets - exact)).long()
    return torch.where(distance < exact, distance, beyond.clamp(max=num_buckets - 1))


class DistanceTable(nn.Embedding):
    """A learned table with one row for each distance, or for each of T5's buckets, and a column for each head.

    It is an `nn.Embedding` of distances, so that quantization and weight decay of this package skip it, as they
    skip other embeddings. Transformers' `Trainer` decays embeddings.
    """

    def __init__(self, rows: int, heads: int, *, mean: float, std: float, max_distance: int | None = None) -> None:
        """Makes a table.

        Args:
            rows: number of rows; with `max_distance`, the number of buckets.
            heads: number of columns.
            mean, std: of the initial weights.
            max_distance: see `t5_buckets`; None for a row for each distance.
        """
        self.mean, self.std = mean, std
        super().__init__(rows, heads)
        self.max_distance = max_distance

    def reset_parameters(self) -> None:
        """Draws the initial weights."""
        init.normal_(self.weight, self.mean, self.std)

    def forward(self, length: int) -> Tensor:  # type: ignore[override]
        """The table for the distances from 0 to `length - 1`, at least float32 `[length, H]`.

        Distances beyond the last row take that row.
        """
        rows, device = self.weight.shape[0], self.weight.device
        if self.max_distance is None:
            index = torch.arange(length, device=device).clamp(max=rows - 1)
        else:
            index = t5_buckets(length, rows, self.max_distance, device)
        return self.weight.to(at_least_float32(self.weight.dtype))[index]


def learned_bias(config: Any) -> DistanceTable | None:
    """T5's bias for the heads of a decoder, which all layers share; None if no layer has it."""
    if "t5" not in config.schemes:
        return None
    rows, std, max_distance = config.t5_num_buckets, config.hidden_size**-0.5, config.t5_max_distance
    return DistanceTable(rows, config.num_attention_heads, mean=0.0, std=std, max_distance=max_distance)


def learned_gain(config: Any) -> DistanceTable | None:
    """URPE's factors on the probabilities of a decoder, initially 1, which all layers share; None if it has none."""
    if config.position_gain is None:
        return None
    rows, max_distance = config.position_gain_length or config.max_position_embeddings, None
    if config.position_gain == "bucket":
        rows, max_distance = config.t5_num_buckets, config.t5_max_distance
    return DistanceTable(rows, config.num_attention_heads, mean=1.0, std=0.0, max_distance=max_distance)
