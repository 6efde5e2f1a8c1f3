"""DCMHA on CUDA devices: matrix products with Triton kernels between them that mix the heads.

A single query without gradients, a decoding step, has kernels of its own. A single query with gradients is left to
`dcmha_chunked`.
"""

import torch
from torch import Tensor

from ...autocast import autocast
from ...custom_operators import AttentionOperator
from ...distance_tables import NO_TABLES, DistanceTables
from ...function_transforms import under_transforms
from ...masking import four_dimensional, mask_one_query
from ..chunked.attention import dcmha_chunked
from ..composition import Composition, pack_factors, unpack_factors
from ..eager import attend_to_all, dcmha_eager
from .arguments import TABLES, MapInputs, MapSettings
from .decode import decode
from .head_groups import common_groups, join_groups, split_factors, split_heads, within_groups
from .kernels.registry import load_kernels
from .passes import attend, attend_backward

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@under_transforms(dcmha_eager)
def dcmha_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pre: Composition | None,
    post: Composition | None,
    scaling: float,
    attention_mask: Tensor | None,
    is_causal: bool,
    sliding_window: int | None,
    first_keys: Tensor | None = None,
    tables: DistanceTables = NO_TABLES,
) -> tuple[Tensor, None]:
    """`dcmha_attention` in memory that grows with the number of queries plus that of keys, not with their product.

    Queries, keys, values, factors and tables have exact gradients, which are the same in every run; an additive mask
    has none. In half precision the scores of several queries are kept in float16, so their magnitude has to stay below
    65504. Under `torch.compile` the op is one node of the graph. With `TRITON_INTERPRET=1` in the environment before
    the first call it runs, slowly, on the CPU. Arguments that are not listed are those of `dcmha_attention`.

    Args:
        query: `[B, H, T, D]` in float16, bfloat16 or float32.
        attention_mask: boolean or additive, broadcastable to `[B, 1, T, S]`. Keys are hidden by False, minus infinity
            and the lowest number of the dtype. A row in which all keys have another large negative number, such as
            -1e9, loses precision, because float32 has no room for scores beside it.
        tables: a bias and a gain `[L, H]`, and the position of the first query. With several queries, a position on a
            device is read, which waits for the device.

    Returns:
        The output `[B, T, H, D]`, and no attention maps.

    Raises:
        ImportError: Triton is not installed.
        ValueError: a dtype, device or mask that the kernels do not support.
    """
    query, key, value = autocast(query, key, value)
    refusal = why_unsupported(query, attention_mask)
    if refusal is not None:
        raise ValueError(refusal)
    if attention_mask is not None:
        attention_mask = four_dimensional(attention_mask)
    if query.shape[2] > 1:
        settings = MapSettings(scaling, is_causal, sliding_window, common_groups(pre, post))
        return _attend(query, key, value, pre, post, attention_mask, first_keys, tables, settings), None
    if not _needs_gradients((query, key, value, *tables.present.values()), pre, post):
        if tables.offset is not None:
            attention_mask = mask_one_query(
                attention_mask, key.shape[2], is_causal, sliding_window, tables.offset, query.device
            )
            sliding_window = None  # it is part of the mask now
        return decode(query, key, value, pre, post, scaling, attention_mask, first_keys, sliding_window, tables), None
    load_kernels(query.device)  # called for its errors, so that all calls raise on the same devices
    return dcmha_chunked(
        query,
        key,
        value,
        pre=pre,
        post=post,
        scaling=scaling,
        attention_mask=attention_mask,
        is_causal=is_causal,
        sliding_window=sliding_window,
        first_keys=first_keys,
        tables=tables,
    )


def why_unsupported(query: Tensor, attention_mask: Tensor | None) -> str | None:
    """Returns an error message if the kernels do not support a query `[B, H, T, D]` or a mask `[.., T, S]`."""
    if query.dtype not in DTYPES:
        return f"implementation='triton' knows {DTYPES}, not {query.dtype}; use 'chunked'"
    if attention_mask is not None and _needs_gradients((attention_mask,)):
        return "implementation='triton' has no gradient for attention_mask; detach it, or use 'chunked'"
    if attention_mask is not None and attention_mask.ndim > 2 and attention_mask.shape[-3] != 1:
        shape = tuple(attention_mask.shape)
        return f"implementation='triton' takes masks that all heads share, [B, 1, T, S], not {shape}; use 'chunked'"
    return None


def _needs_gradients(tensors: tuple[Tensor, ...], *stages: Composition | None) -> bool:
    """Whether a gradient is needed of one of the tensors, of any shape, or of a factor of a stage."""
    if not torch.is_grad_enabled():
        return False
    factors = [factor for stage in stages if stage is not None for factor in stage.backing_tensors().values()]
    return any(part.requires_grad for part in (*tensors, *factors))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: Composition | None,
    post: Composition | None,
    attention_mask: Tensor | None,
    first_keys: Tensor | None,
    tables: DistanceTables,
    settings: MapSettings,
) -> Tensor:
    """Returns `[B, T, H, D]` for several queries `[B, H, T, D]`, whose head groups become items of the batch."""
    groups = settings.groups
    query, key, value = (split_heads(rows, groups) for rows in (query, key, value))
    packed = (pack_factors(within_groups(stage, groups)) for stage in (pre, post))
    (*pre_sides, pre_static), (*post_sides, post_static) = packed
    pre_query, pre_key, post_query, post_key = (split_factors(side, groups) for side in (*pre_sides, *post_sides))
    factors = pre_query, pre_key, post_query, post_key, pre_static, post_static
    composed_bias, bias = (tables.bias, None) if tables.compose_bias and pre is not None else (None, tables.bias)
    others = composed_bias, bias, tables.gain, attention_mask, first_keys, tables.offset_tensor
    inputs = MapInputs(query, key, value, *factors, *others)
    output, _ = _forward_op(*inputs, *settings)
    return join_groups(output, groups)


def _reference(inputs: MapInputs, settings: MapSettings) -> Tensor:
    """The reference op on the arguments of the operator, without masks and tables; a group has its part of static."""
    group = slice(inputs.query.shape[1])
    statics = (None if each is None else each[group, group] for each in (inputs.pre_static, inputs.post_static))
    sides = (inputs.terms[:2], inputs.terms[2:])
    pre, post = (
        unpack_factors({"query": query, "key": key}, static)
        for (query, key), static in zip(sides, statics, strict=True)
    )
    return attend_to_all(inputs.query, inputs.key, inputs.value, pre, post)


# The inputs that have gradients are the first fields of `MapInputs`.
_forward_op = AttentionOperator(
    "dcmha_triton",
    MapInputs,
    MapSettings,
    attend,
    attend_backward,
    _reference,
    differentiable=MapInputs._fields[: MapInputs._fields.index("mask")],
    on_demand=TABLES,
    keeps_lse=True,
).forward
