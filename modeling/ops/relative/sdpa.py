"""Relative attention on PyTorch's scaled dot product attention, with the position terms as an additive mask."""

from torch import Tensor

from ..masking import both, key_distances, split_mask, visible_distances
from ..sdpa import attend_with_mask, plain_attention
from .eager import NO_TERMS, PositionTerms


def relative_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    attention_mask: Tensor | None,
    is_causal: bool,
    sliding_window: int | None,
    dropout: float = 0.0,
    terms: PositionTerms = NO_TERMS,
) -> tuple[Tensor, None]:
    """`relative_attention` through PyTorch's SDPA, with one `[B, H, T, S]` mask in memory if there are tables.

    Returns:
        The output `[B, T, H, D]`, and no attention maps.
    """
    content_query = terms.content_query(query)
    if not terms.tables and terms.offset is None and not dropout:
        return plain_attention(
            content_query,
            key,
            value,
            scaling=scaling,
            attention_mask=attention_mask,
            is_causal=is_causal,
            sliding_window=sliding_window,
        )
    distance = key_distances(query.shape[2], key.shape[2], terms.offset, query.device)
    positions = terms.position_scores(query, distance)
    given, bias = split_mask(attention_mask)
    visible = both(visible_distances(distance, is_causal=is_causal, sliding_window=sliding_window), given)
    if positions is not None:
        bias = positions * scaling if bias is None else positions * scaling + bias
    return attend_with_mask(content_query, key, value, visible, bias, scaling, dropout=dropout), None
