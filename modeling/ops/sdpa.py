"""Attention without composition or position terms, on PyTorch's scaled dot product attention."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .autocast import autocast, without_autocast
from .distance_tables import NO_TABLES, DistanceTables, at_distances
from .masking import both, four_dimensional, join_mask, key_distances, split_mask, visible_keys, with_first_keys


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    attention_mask: Tensor | None,
    is_causal: bool,
    sliding_window: int | None,
    first_keys: Tensor | None = None,
    tables: DistanceTables = NO_TABLES,
    **_: Any,
) -> tuple[Tensor, None]:
    """Plain multi-head or grouped-query attention. Returns the output `[B, T, H, D]`, and no attention maps.

    The arguments are those of `dcmha_attention`, which calls this if `pre` and `post` are None. A query that sees no
    key gives zeros. A bias by distance becomes an additive mask with an element for every pair.

    Raises:
        ValueError: there is a gain, which SDPA cannot apply.
    """
    if tables.gain is not None:
        raise ValueError("implementation='sdpa' cannot multiply probabilities (position_gain); use 'chunked'")
    queries, keys = query.shape[-2], key.shape[-2]
    attention_mask = with_first_keys(attention_mask, first_keys, keys, query.device)
    # SDPA's own causal mask puts the first query at the first key. That is right only for as many queries as keys. On
    # CPUs PyTorch multiplies its -inf by the scaling, which gives infinity or NaN unless the scaling is positive.
    # Lengths are compared last: `torch.export` makes each comparison a condition on the inputs of its program.
    is_structural = is_causal and sliding_window is None and attention_mask is None and not tables.has_any
    if is_structural and scaling > 0 and queries == keys:
        return attend_with_mask(query, key, value, None, None, scaling, is_causal=True), None
    given, bias = split_mask(attention_mask)
    structural = visible_keys(
        queries, keys, is_causal=is_causal, sliding_window=sliding_window, device=query.device, offset=tables.offset
    )
    if tables.bias is not None:
        by_distance = at_distances(tables.bias, key_distances(queries, keys, tables.offset, query.device))
        bias = by_distance if bias is None else bias + by_distance
    return attend_with_mask(query, key, value, both(structural, given), bias, scaling), None


def attend_with_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    bias: Tensor | None,
    scaling: float,
    *,
    dropout: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    """SDPA with a boolean mask, a bias on the scores, or both; a query that sees no key gives zeros.

    Args:
        query: `[B, H, T, D]`.
        key, value: `[B, H_kv, S, D]`.
        visible, bias: broadcastable to `[B, H, T, S]`. With a bias of more precision than the queries, all is computed
            in its dtype: SDPA takes a single one, and in theirs far keys may not be told apart.
        dropout: the share of the probabilities that become zero.
        is_causal: uses SDPA's own causal mask. It takes no other mask then, and as many queries as keys.

    Returns:
        `[B, T, H, D]`.
    """
    query, key, value = autocast(query, key, value)
    dtype = query.dtype
    if bias is not None:
        # SDPA would give a query that sees only such keys the mean of all others.
        visible = both(visible, bias != -torch.inf)
    if bias is not None and bias.dtype != dtype:
        wider = torch.promote_types(bias.dtype, dtype)
        query, key, value, bias = (tensor.to(wider) for tensor in (query, key, value, bias))
    mask = join_mask(visible, bias)
    with without_autocast(query.device):
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if mask is None else four_dimensional(mask),
            dropout_p=dropout,
            is_causal=is_causal,
            scale=scaling,
            enable_gqa=bool(query.shape[1] != key.shape[1]),  # `torch.jit.trace` makes tensors of sizes
        )
    if visible is not None:
        output = output.masked_fill(~visible.any(-1, keepdim=True), 0.0)
    return output.transpose(1, 2).to(dtype)
