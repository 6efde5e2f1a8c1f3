"""The reference implementation: relative attention in the order of its equation, with all intermediates in memory."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..distance_tables import at_distances
from ..masking import both, key_distances, masked_softmax, split_mask, visible_distances


def relative_eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    position_embeddings: Tensor | None,
    position_bias: Tensor | None,
    content_bias: Tensor | None,
    scaling: float,
    attention_mask: Tensor | None,
    is_causal: bool,
    sliding_window: int | None,
    offset: int | Tensor | None = None,
    dropout: float = 0.0,
    later_rows: int = 0,
) -> tuple[Tensor, Tensor]:
    """`relative_attention` by definition, with the softmax in at least float32.

    Returns:
        The output `[B, T, H, D]` and the probabilities `[B, H, T, S]`.
    """
    distance = key_distances(query.shape[2], key.shape[2], offset, query.device)
    content_query = query if content_bias is None else query + content_bias[:, None]
    scores = content_query @ key.transpose(-1, -2)  # [B, H, T, S]
    positions = position_scores(query, position_embeddings, position_bias, distance + later_rows)
    scores = (scores if positions is None else scores + positions) * scaling
    given, bias = split_mask(attention_mask)
    visible = both(visible_distances(distance, is_causal=is_causal, sliding_window=sliding_window), given)
    probs = masked_softmax(scores if bias is None else scores + bias, visible)
    probs = F.dropout(probs, dropout) if dropout else probs
    return (probs.to(value.dtype) @ value).transpose(1, 2), probs


def position_scores(query: Tensor, embeddings: Tensor | None, bias: Tensor | None, rows: Tensor) -> Tensor | None:
    """The terms of the score that read the position tables, before scaling.

    Args:
        query: `[B, H, T, D]`.
        embeddings, bias: `[L, H, D]` and `[L, H]`, either may be None.
        rows: `[T, S]`, the row of the tables for each query and key. Where the tables have no such row, the nearest is
            read, and the caller must hide the key.

    Returns:
        Broadcastable to `[B, H, T, S]`; None without tables.
    """
    scores: Tensor | None = None
    if embeddings is not None:
        by_distance = torch.einsum("bhtd,lhd->bhtl", query, embeddings)
        index = rows.clamp(0, embeddings.shape[0] - 1).expand(*query.shape[:3], -1)
        scores = by_distance.gather(-1, index)
    if bias is not None:
        by_distance = at_distances(bias, rows)
        scores = by_distance if scores is None else scores + by_distance
    return scores
