"""DCMHA in linear memory, for any device: a few queries at a time, with their scores for all keys that they can see.

The scores of such a chunk of queries are composed, go through the softmax and are composed again, before the next chunk
reuses their memory. Only the inputs are saved for the backward pass, which computes the maps of each chunk again.
"""

from torch import Tensor

from ...autocast import autocast, without_autocast
from ...custom_operators import AttentionOperator
from ...distance_tables import NO_TABLES, DistanceTables
from ...function_transforms import under_transforms
from ...masking import four_dimensional, mask_one_query, with_first_keys
from ..composition import Composition, pack_factors, unpack_factors
from ..eager import attend_to_all, dcmha_eager
from .arguments import DIFFERENTIABLE, ChunkedInputs, ChunkedSettings, DecodeStep, stages_of
from .decode import attend_to_cache
from .passes import attend, attend_backward


def _reference(inputs: ChunkedInputs, settings: ChunkedSettings) -> Tensor:
    """The reference op on the arguments of the operator, without masks and tables."""
    stages = stages_of(inputs, settings)
    pre, post = (unpack_factors({"query": s.query, "key": s.key}, s.static, s.groups) for s in stages)
    return attend_to_all(inputs.query, inputs.key, inputs.value, pre, post)


_forward_op = AttentionOperator(
    "dcmha_chunked",
    ChunkedInputs,
    ChunkedSettings,
    attend,
    attend_backward,
    _reference,
    differentiable=DIFFERENTIABLE,
    on_demand=("mask",),
).forward


@under_transforms(dcmha_eager)
def dcmha_chunked(
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

    Every input has an exact gradient, an additive mask and tables by distance included. Products and softmax run in at
    least float32, with two exceptions: without C code, the maps and products of a single query are rounded to its
    dtype; and processors with instructions for bfloat16 products use them for bfloat16 inputs, with maps in bfloat16.
    Under `torch.compile` the op is one node of the graph; inside it, `choose_composer` decides what is compiled. Under
    the transforms of `torch.func` (`vmap`, `grad`, ...) `dcmha_eager` runs instead, with all maps in memory. With
    several queries, an `offset` on a device is read, which waits for the device. Shapes are those of `dcmha_attention`.

    Returns:
        The output `[B, T, H, D]`, and None in place of attention maps.
    """
    query, key, value = autocast(query, key, value)
    if attention_mask is not None:
        attention_mask = four_dimensional(attention_mask)
    if query.shape[2] == 1:
        mask = with_first_keys(attention_mask, first_keys, key.shape[2], query.device)
        step = DecodeStep(query, key, value, pre, post, scaling, mask, tables)
        return _attend_one_query(step, is_causal, sliding_window), None
    factors = (*pack_factors(pre), *pack_factors(post))
    others = (attention_mask, first_keys, tables.bias, tables.gain, tables.offset_tensor)
    inputs = ChunkedInputs(query, key, value, *factors, *others)
    pre_groups, post_groups = (1 if stage is None else stage.groups for stage in (pre, post))
    settings = ChunkedSettings(scaling, is_causal, sliding_window, pre_groups, post_groups, tables.compose_bias)
    return _forward_op(*inputs, *settings), None


def _attend_one_query(step: DecodeStep, is_causal: bool, sliding_window: int | None) -> Tensor:
    """Attention of a query at position `step.tables.offset`, by default that of the last key: `[B, 1, H, D]`.

    At the last key causality hides nothing, and a window just keeps the last keys. At any other position both become
    part of the mask.
    """
    keys, device = step.key.shape[2], step.query.device
    if step.tables.offset is not None:
        mask = mask_one_query(step.mask, keys, is_causal, sliding_window, step.tables.offset, device)
        step, sliding_window = step._replace(mask=mask), None  # the window is part of the mask now
    if sliding_window is not None and sliding_window < keys:
        step = step.with_last_keys(sliding_window)
    with without_autocast(device):
        return attend_to_cache(step)
