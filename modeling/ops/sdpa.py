"""Attention without composition or position terms, on PyTorch's scaled dot product attention."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .distance_tables import NO_TABLES, DistanceTables, at_distances
from .masking import both, key_distances, split_mask, visible_keys, with_first_keys


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
        ValueError: there is a gain, which SDPA cannot apply, or a bias with half precision inputs, whose dtype SDPA
            would round it to.
    """
    if tables.gain is not None:
        raise ValueError("implementation='sdpa' cannot multiply probabilities (position_gain); use 'chunked'")
    if tables.bias is not None and query.dtype.itemsize < 4:
        raise ValueError(f"implementation='sdpa' would round position_bias to {query.dtype}; use 'chunked'")
    queries, keys = query.shape[-2], key.shape[-2]
    attention_mask = with_first_keys(attention_mask, first_keys, keys, query.device)
    # SDPA's own causal mask puts the first query at the first key. That is right only for as many queries as keys.
    aligned = queries == keys and tables.offset is None
    builtin_causal = is_causal and aligned and sliding_window is None and attention_mask is None and tables.bias is None
    visible, mask = None, None
    if not builtin_causal:
        given, bias = split_mask(attention_mask)
        structural = visible_keys(
            queries,
            keys,
            is_causal=is_causal,
            sliding_window=sliding_window,
            device=query.device,
            offset=tables.offset,
        )
        visible = both(structural, given)
        if tables.bias is not None:
            by_distance = at_distances(tables.bias, key_distances(queries, keys, tables.offset, query.device))
            bias = by_distance.to(query.dtype) if bias is None else bias + by_distance.to(query.dtype)
        mask = visible if bias is None else bias
        if bias is not None and visible is not None:
            mask = bias.masked_fill(~visible, torch.finfo(bias.dtype).min)
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]
    enable_gqa = bool(query.shape[1] != key.shape[1])  # `torch.jit.trace` makes tensors of sizes
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=builtin_causal, scale=scaling, enable_gqa=enable_gqa
    )
    if visible is not None:
        output = output.masked_fill(~visible.any(-1, keepdim=True), 0.0)
    return output.transpose(1, 2), None
