"""`dcmha_chunked` for a single query, a decoding step: keys, values and their factors are read in place, in the cache.

On a CPU it is one call of C code, if `decode_native.decodes_in_c` says so. Otherwise it is ordinary differentiable
PyTorch, which `torch.compile` can trace; its maps are `[B, S, H]`, in the layout of the factors.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...custom_operators import NAMESPACE, are_operators_observed
from ...distance_tables import DistanceTables, at_distances
from ...dtypes import at_least_float32
from ...masking import key_distances, masked_softmax, split_mask
from ...scaled_products import scaled_bmm
from ..composition import SIDES, TENSORS, Composition, from_list, list_tensors
from .arguments import DecodeStep
from .composers.choice import compile_mode
from .composers.stepwise import same_group
from .decode_native import decode_in_c, decodes_in_c


def attend_to_cache(step: DecodeStep) -> Tensor:
    """Attention of the query of a step, `[B, 1, H, D]`."""
    if _calls_c(step.query.dtype) and decodes_in_c(step) and _user_allows_c():
        return (_decode_as_operator if torch.compiler.is_compiling() else _decode)(step)
    return _decode_in_pytorch(step)


def _calls_c(dtype: torch.dtype) -> bool:
    """Whether C code can run in this place, and is faster than PyTorch's operators for queries of `dtype`.

    What Inductor generates is as fast in float32.
    """
    if torch.compiler.is_compiling():
        return dtype != torch.float32
    return not are_operators_observed()


@torch.compiler.assume_constant_result
def _user_allows_c() -> bool:
    """Whether the user lets C code be compiled; while tracing, a constant."""
    return compile_mode() != "0"


def _decode(step: DecodeStep) -> Tensor:
    """`attend_to_cache` in C, but in PyTorch if the C code cannot be compiled for these sizes."""
    output = decode_in_c(step)
    return _decode_in_pytorch(step) if output is None else output


def _decode_as_operator(step: DecodeStep) -> Tensor:
    """`_decode` as an operator that `torch.compile` does not trace."""
    factors = [*list_tensors(step.pre), *list_tensors(step.post)]
    tables = step.tables._replace(offset=step.tables.offset_tensor)
    return _decode_op(step.query, step.key, step.value, factors, step.mask, step.groups, step.scaling, *tables)


@torch.library.custom_op(f"{NAMESPACE}::dcmha_decode", mutates_args=())
def _decode_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    factors: Sequence[Tensor | None],
    mask: Tensor | None,
    groups: int,
    scaling: float,
    position_bias: Tensor | None,
    position_gain: Tensor | None,
    offset: Tensor | None,
    compose_bias: bool,
) -> Tensor:
    """`_decode` of a `DecodeStep` whose stages and tables are taken apart; returns `[B, 1, H, D]`.

    Args:
        factors: `list_tensors` of `pre`, then of `post`.
        position_bias, position_gain, offset, compose_bias: the fields of `DistanceTables`.
    """
    count = len(TENSORS)
    pre, post = from_list(factors[:count], groups), from_list(factors[count:], groups)
    tables = DistanceTables(position_bias, position_gain, offset, compose_bias)
    return _decode(DecodeStep(query, key, value, pre, post, scaling, mask, tables))


@_decode_op.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    """An empty `[B, 1, H, D]` for a query `[B, H, 1, D]`."""
    return query.new_empty(query.transpose(1, 2).shape)


def _decode_in_pytorch(step: DecodeStep) -> Tensor:
    """`attend_to_cache` in differentiable PyTorch, for any arguments."""
    batch, heads, _, width = step.query.shape
    scores = multiply_cached(step.query.squeeze(2), step.key.transpose(-1, -2), step.scaling)  # [B, H, S]
    probs = map_scores(scores, step)
    return multiply_cached(probs.to(step.value.dtype), step.value).view(batch, 1, heads, width)


def _rows_by_distance(tables: DistanceTables, keys: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """The bias and the gain of each key for a single query, `[H, S]` each; None for a table that is absent."""
    if tables.bias is None and tables.gain is None:
        return None, None
    distance = key_distances(1, keys, tables.offset, device)
    bias, gain = (None if one is None else at_distances(one, distance)[:, 0] for one in (tables.bias, tables.gain))
    return bias, gain


def map_scores(scores: Tensor, step: DecodeStep) -> Tensor:
    """Turns the scores `[B, H, S]` of a step into composed probabilities `[B, H, S]`, in at least float32."""
    bias, gain = _rows_by_distance(step.tables, scores.shape[2], scores.device)
    maps = scores.to(at_least_float32(scores.dtype)).transpose(1, 2).contiguous()
    if bias is not None and step.tables.compose_bias:
        maps = maps + bias.t()
    if step.pre is not None:
        maps = compose_maps(maps, step.pre)
    if bias is not None and not step.tables.compose_bias:
        maps = maps + bias.t()
    mask = None if step.mask is None else step.mask.squeeze(2).transpose(1, 2)
    maps = _softmax(maps, mask, are_biased=bias is not None)
    if gain is not None:
        maps = maps * gain.t()
    if step.post is not None:
        maps = compose_maps(maps, step.post)
    return maps.transpose(1, 2).contiguous()


def multiply_cached(rows: Tensor, cached: Tensor, scaling: float = 1.0) -> Tensor:
    """`rows` `[B, H, a]` times `cached` `[B, H_kv, a, b]`, scaled: `[B, H, b]`.

    The product is a `baddbmm`, which Inductor leaves to the BLAS library. Of other products with one row it
    makes loops, into which it fuses the computation of the row: the composition would run again for every few columns.
    """
    (batch, heads, inner), kv_heads = rows.shape, cached.shape[1]
    grouped = rows.reshape(batch * kv_heads, heads // kv_heads, inner)
    return scaled_bmm(grouped, cached.flatten(0, 1), scaling).view(batch, heads, cached.shape[-1])


def compose_maps(maps: Tensor, composition: Composition) -> Tensor:
    """Composes maps `[B, S, H]` of one query.

    Without a compiler, all terms that do not depend on the key are applied as one small matrix product. A compiler
    fuses the low-rank terms of both sides into one pass over the maps, so that only the static matrix is a product.
    """
    compiles = torch.compiler.is_compiling()
    matrix = _static_matrix(composition, maps.dtype) if compiles else _query_matrix(composition, maps.dtype)
    composed = maps if matrix is None else maps @ matrix
    for side in SIDES if compiles else ("key",):
        down, up, gate = composition.side(side)  # [B, 1 or S, ...]
        if down is not None and up is not None:
            for down_term, up_term in zip(down.unbind(2), up.unbind(2), strict=True):
                composed = torch.addcmul(composed, _sum_heads(maps * down_term, composition.groups), up_term)
        if gate is not None:
            composed = torch.addcmul(composed, maps, gate)
    return composed


def _query_matrix(composition: Composition, dtype: torch.dtype) -> Tensor | None:
    """The sum of the identity, the static matrix and the query's terms; None if that is just the identity.

    Returns:
        `[B, H, H]`, or `[H, H]` if the query has no terms; indexed [in, out].
    """
    down, up, gate = composition.side("query")
    matrix = _static_matrix(composition, dtype)
    if gate is not None:
        identity = int(matrix is None)  # the static matrix includes it already
        diagonal = torch.diag_embed(gate.squeeze(1).to(dtype) + identity)
        matrix = diagonal if matrix is None else matrix + diagonal
    if down is None or up is None:
        return matrix
    down, up = down.squeeze(1).to(dtype).transpose(1, 2), up.squeeze(1).to(dtype)
    if matrix is None:
        matrix = torch.eye(up.shape[-1], dtype=dtype, device=up.device)
    if composition.groups > 1:
        return matrix + down @ up * same_group(composition.groups, up)
    return torch.baddbmm(matrix, down, up)


def _static_matrix(composition: Composition, dtype: torch.dtype) -> Tensor | None:
    """The identity plus the static matrix, `[H, H]`, indexed [in, out]; None without a static matrix."""
    static = composition.static
    return None if static is None else static + torch.eye(len(static), dtype=dtype, device=static.device)


def _sum_heads(maps: Tensor, groups: int) -> Tensor:
    """`[B, S, H]` summed over the heads of each group: `[B, S, 1]` for one group, else expanded to `[B, S, H]`."""
    if groups == 1:
        return maps.sum(-1, keepdim=True)
    grouped = maps.unflatten(-1, (groups, -1))
    return grouped.sum(-1, keepdim=True).expand_as(grouped).flatten(2)


def _softmax(scores: Tensor, mask: Tensor | None, are_biased: bool) -> Tensor:
    """`masked_softmax` of `scores` `[B, S, H]` over dimension 1, the keys; `mask` broadcasts to the scores."""
    visible, bias = split_mask(mask)
    return masked_softmax(scores if bias is None else scores + bias, visible, are_biased=are_biased, dim=1)
