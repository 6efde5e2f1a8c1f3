"""Relative attention on PyTorch's scaled dot product attention, with the position terms as an additive mask."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..masking import both, key_distances, split_mask, visible_distances
from ..sdpa import plain_attention
from .eager import position_scores


def relative_sdpa(
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
) -> tuple[Tensor, None]:
    """`relative_attention` through PyTorch's SDPA, with one `[B, H, T, S]` mask in memory if there are tables.

    Returns:
        The output `[B, T, H, D]`, and no attention maps.
    """
    content_query = query if content_bias is None else query + content_bias[:, None]
    distance = key_distances(query.shape[2], key.shape[2], offset, query.device)
    positions = position_scores(query, position_embeddings, position_bias, distance + later_rows)
    if positions is None and offset is None and not dropout:
        return plain_attention(
            content_query,
            key,
            value,
            scaling=scaling,
            attention_mask=attention_mask,
            is_causal=is_causal,
            sliding_window=sliding_window,
        )
    given, bias = split_mask(attention_mask)
    visible = both(visible_distances(distance, is_causal=is_causal, sliding_window=sliding_window), given)
    mask = None if positions is None else positions * scaling
    if bias is not None:
        mask = bias if mask is None else mask + bias
    if mask is not None and visible is not None:
        mask = mask.masked_fill(~visible, torch.finfo(mask.dtype).min)
    mask = visible if mask is None else mask
    output = F.scaled_dot_product_attention(
        content_query,
        key,
        value,
        attn_mask=None if mask is None else mask.expand(*query.shape[:3], key.shape[2]),
        dropout_p=dropout,
        scale=scaling,
    )
    if visible is not None:
        output = output.masked_fill(~visible.any(-1, keepdim=True), 0.0)
    return output.transpose(1, 2), None
