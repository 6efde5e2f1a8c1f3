"""Attention sinks: a learned score of each head that takes part of every query's probability (GPT-OSS).

Composed heads get them as a key of its own before all others, whose score with every query is the sink's and whose
value is zero. Queries mix the sinks of heads as they mix scores; on the side of keys that key has no factors.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# Channels that are added to queries and keys: one is used, and rows of aligned length stay so.
CHANNELS = 8


def with_sink_key(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries `[B, H, T, D + 8]`, keys `[B, H_kv, 1 + S, D + 8]` and values `[B, H_kv, 1 + S, D_v]`.

    Args:
        query, key, value: `[B, H, T, D]`, `[B, H_kv, S, D]` and `[B, H_kv, S, D_v]`.
        sinks: `[H]`.
        scaling: of scores, which the sink is exempt from.
    """
    batch, heads, length, width = query.shape
    channel = (sinks / scaling).to(query.dtype)[None, :, None, None].expand(batch, heads, length, 1)
    query = F.pad(torch.cat([query, channel], dim=3), (0, CHANNELS - 1))
    sink = F.pad(key.new_ones(*key.shape[:2], 1, 1), (width, CHANNELS - 1))
    return query, torch.cat([sink, F.pad(key, (0, CHANNELS))], dim=2), F.pad(value, (0, 0, 1, 0))


def with_visible_sink(mask: Tensor | None) -> Tensor | None:
    """A mask `[.., S]`, boolean (True: visible) or additive, with the sink's key before all others."""
    return None if mask is None else F.pad(mask, (1, 0), value=mask.dtype == torch.bool)
