"""`dcmha_chunked` for a single query, a decoding step: the factors of the keys are read as they lie in the cache.

Maps are `[B, S, H]`, as those factors are. All of it is ordinary differentiable PyTorch, which compilers see through.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .dcmha_chunked_stepwise import same_group
from .dcmha_eager import masked_softmax
from .masking import split_mask

if TYPE_CHECKING:
    from .dcmha import Composition


def attend_to_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: "Composition | None",
    post: "Composition | None",
    scaling: float,
    mask: Tensor | None,
) -> Tensor:
    """Returns `[B, 1, H, D]` for a query `[B, H, 1, D]` that sees all keys but those that `mask` hides.

    Args:
        key, value: `[B, H_kv, S, D]`.
        mask: four dimensions that broadcast to `[B, H, 1, S]`.
    """
    batch, heads, _, width = query.shape
    kv_heads, keys = key.shape[1:3]
    dtype = torch.promote_types(query.dtype, torch.float32)
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, width) * scaling
    maps = (grouped @ key.transpose(-1, -2)).reshape(batch, heads, keys).to(dtype)
    if pre is not None:
        maps = compose_maps(maps.transpose(1, 2).contiguous(), pre).transpose(1, 2)
    probs = _softmax(maps, mask)
    if post is not None:
        probs = compose_maps(probs.transpose(1, 2).contiguous(), post).transpose(1, 2).contiguous()
    output = probs.reshape(batch, kv_heads, heads // kv_heads, keys).to(value.dtype) @ value
    return output.reshape(batch, 1, heads, width)


def compose_maps(maps: Tensor, composition: "Composition") -> Tensor:
    """Composes maps `[B, S, H]` of one query."""
    composed = maps
    mixing = _mixing(composition, maps.dtype)
    if mixing is not None:
        composed = composed + maps @ mixing
    if composition.key_down is not None and composition.key_up is not None:
        shape = (composition.groups, -1)
        grouped = maps.unflatten(-1, shape)  # [B, S, G, H/G]
        for down, up in zip(composition.key_down.unbind(2), composition.key_up.unbind(2), strict=True):
            hidden = (grouped * down.unflatten(-1, shape)).sum(-1, keepdim=True)
            composed = torch.addcmul(composed.unflatten(-1, shape), hidden, up.unflatten(-1, shape)).flatten(2)
    if composition.key_gate is not None:
        composed = torch.addcmul(composed, maps, composition.key_gate)
    return composed


def _mixing(composition: "Composition", dtype: torch.dtype) -> Tensor | None:
    """The static and the query's terms as matrices `[B or 1, H, H]`, indexed [in, out]; None where there are none."""
    terms = [] if composition.static is None else [composition.static[None].to(dtype)]
    if composition.query_down is not None and composition.query_up is not None:
        down, up = composition.query_down[:, 0].to(dtype), composition.query_up[:, 0].to(dtype)  # [B, R, H]
        terms.append(down.transpose(1, 2) @ up * same_group(composition.groups, down))
    if composition.query_gate is not None:
        terms.append(torch.diag_embed(composition.query_gate[:, 0].to(dtype)))
    return sum(terms[1:], start=terms[0]) if terms else None


def _softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Over the keys of `[B, H, S]`; hidden keys, and rows with nothing visible, get zero."""
    visible, bias = split_mask(None if mask is None else mask[:, :, 0])
    return masked_softmax(scores if bias is None else scores + bias, visible)
