"""`dcmha_chunked` for a single query, a decoding step: the factors of the keys are read as they lie in the cache.

On a CPU it is one call of C code where that serves. Everything else is ordinary differentiable PyTorch, which compilers
see through; its maps are `[B, S, H]`, as the factors are.
"""

import torch
from torch import Tensor

from ...masking import masked_softmax, split_mask
from ..composition import Composition
from .composers.choice import choose_composer
from .composers.native import NATIVE
from .composers.stepwise import same_group
from .decode_native import attend, attend_op, serves


def attend_to_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: Composition | None,
    post: Composition | None,
    scaling: float,
    mask: Tensor | None,
) -> Tensor:
    """Returns `[B, 1, H, D]` for a query `[B, H, 1, D]` that sees all keys but those that `mask` hides.

    Args:
        key, value: `[B, H_kv, S, D]`.
        mask: four dimensions that broadcast to `[B, H, 1, S]`.
    """
    compiles = torch.compiler.is_compiling()
    # What Inductor makes of a float32 step is no slower than C code with an operator's overhead.
    if not (compiles and query.dtype == torch.float32) and serves(query, key, value, pre, post, mask) and _has_c():
        return (attend_op if compiles else attend)(query, key, value, pre, post, scaling, mask)
    batch, heads, _, width = query.shape
    scores = multiply_cached(query.squeeze(2), key.transpose(-1, -2), scaling)  # [B, H, S]
    probs = map_scores(scores, pre, post, None if mask is None else mask.squeeze(2))
    return multiply_cached(probs.to(value.dtype), value).view(batch, 1, heads, width)


@torch.compiler.assume_constant_result
def _has_c() -> bool:
    """Whether C code composes float32 maps on a CPU, as those of all dtypes are here."""
    return choose_composer(torch.device("cpu"), torch.float32, 0) is NATIVE


def map_scores(scores: Tensor, pre: Composition | None, post: Composition | None, mask: Tensor | None) -> Tensor:
    """Scores `[B, H, S]` to composed probabilities, in at least float32."""
    maps = scores.to(torch.promote_types(scores.dtype, torch.float32)).transpose(1, 2).contiguous()
    if pre is not None:
        maps = compose_maps(maps, pre)
    maps = _softmax(maps, None if mask is None else mask.transpose(1, 2), dim=1)
    if post is not None:
        maps = compose_maps(maps, post)
    return maps.transpose(1, 2).contiguous()


def multiply_cached(rows: Tensor, cached: Tensor, scaling: float = 1.0) -> Tensor:
    """`rows` `[B, H, a]` times `cached` `[B, H_kv, a, b]`, scaled: `[B, H, b]`.

    Inductor writes matrix products with one row as loops of its own, with what made the row inside them: composition
    would be repeated for every few columns. It leaves this operator to the library that is made for products.
    """
    batch, kv_heads = cached.shape[:2]
    grouped = rows.reshape(batch * kv_heads, -1, rows.shape[-1])  # [B * H_kv, H / H_kv, a]
    product = torch.baddbmm(rows.new_zeros(1), grouped, cached.flatten(0, 1), beta=0, alpha=scaling)
    return product.view(batch, -1, product.shape[-1])


def compose_maps(maps: Tensor, composition: "Composition") -> Tensor:
    """Composes maps `[B, S, H]` of one query.

    Step by step, everything that the keys have no part in is one small matrix product. A compiler reads the maps once
    for the low-rank terms of both sides, and is left with the static term for a product.
    """
    fuses = torch.compiler.is_compiling()
    mixing = _static_mixing(composition, maps.dtype) if fuses else _mixing(composition, maps.dtype)
    composed = maps if mixing is None else maps @ mixing
    for side in ("query", "key") if fuses else ("key",):
        down, up, gate = (getattr(composition, f"{side}_{name}") for name in ("down", "up", "gate"))  # [B, 1 or S, ...]
        for first, second in () if down is None else zip(down.unbind(2), up.unbind(2), strict=True):
            composed = torch.addcmul(composed, _sum_heads(maps * first, composition.groups), second)
        if gate is not None:
            composed = torch.addcmul(composed, maps, gate)
    return composed


def _mixing(composition: "Composition", dtype: torch.dtype) -> Tensor | None:
    """Identity, static and query's terms as a matrix `[B or 1, H, H]`, indexed [in, out]; None for the identity."""
    down, up, gate = composition.query_down, composition.query_up, composition.query_gate
    matrix = _static_mixing(composition, dtype)
    if gate is not None:
        diagonal = torch.diag_embed(gate.squeeze(1).to(dtype) + (matrix is None))
        matrix = diagonal if matrix is None else matrix + diagonal
    if down is None or up is None:
        return matrix
    down, up = down.squeeze(1).to(dtype).transpose(1, 2), up.squeeze(1).to(dtype)
    if matrix is None:
        matrix = torch.eye(up.shape[-1], dtype=dtype, device=up.device)
    if composition.groups > 1:
        return matrix + down @ up * same_group(composition.groups, up)
    return torch.baddbmm(matrix, down, up)


def _static_mixing(composition: "Composition", dtype: torch.dtype) -> Tensor | None:
    """Identity and static term, `[H, H]`."""
    static = composition.static
    return None if static is None else static.to(dtype) + torch.eye(len(static), dtype=dtype, device=static.device)


def _sum_heads(maps: Tensor, groups: int) -> Tensor:
    """`[B, S, H]` summed inside each group of heads, as something that broadcasts to `[B, S, H]`."""
    if groups == 1:
        return maps.sum(-1, keepdim=True)
    grouped = maps.unflatten(-1, (groups, -1))
    return grouped.sum(-1, keepdim=True).expand_as(grouped).flatten(2)


def _softmax(scores: Tensor, mask: Tensor | None, dim: int) -> Tensor:
    """Over the keys, which are dimension `dim`."""
    visible, bias = split_mask(mask)
    return masked_softmax(scores if bias is None else scores + bias, visible, dim)
