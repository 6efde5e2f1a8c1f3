"""The function of Transformers' attention interface by which modules with composed heads attend.

It takes what models of Transformers pass to such a function, and calls an implementation of this package.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from ..layers.attention_interface import FOREIGN_TERMS, attention_function_of
from ..ops.custom_operators import NAMESPACE
from ..ops.dcmha.attention import choose_implementation
from ..ops.dcmha.key_source import KeySource
from ..ops.distance_tables import NO_TABLES
from ..ops.masking import four_dimensional
from ..serving.paged_attention import CURRENT
from .attention_sinks import with_sink_key, with_visible_sink
from .interface_attention import ComposedInterfaceAttention
from .interface_modules import dropout_error

# The name of the function in the configurations of composed modules. Other copies of this code, which came with
# models, register functions of their own.
COMPOSED_HEADS = f"{NAMESPACE}_composed_heads"


def attend_with_composed_heads(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    key_source: KeySource | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """A function of Transformers' attention interface, for modules that `compose_heads_of` has changed.

    As Transformers' function for SDPA does, it takes windows from the mask alone. With a `key_source` (as in
    `attention_function`, or in the thread, see `attending_to_pages`) no mask is read, and windows are what the module
    passes as `sliding_window`.

    Args:
        query, key, value: `[B, H, T, D]`, `[B, H_kv, S, D]` and `[B, H_kv, S, D_v]`.
        attention_mask: broadcastable to `[B, H, T, S]`; boolean (True: visible) or additive.
        position_bias: broadcastable to `[B, H, T, S]`, added to the composed scores.
        s_aux: attention sinks `[H]`.

    Returns:
        The output `[B, T, H, D_v]`, and the composed probabilities `[B, H, T, S]` or None.

    Raises:
        ValueError: the module is another, drops probabilities, packs documents without a mask, or has terms that
            composed heads do not have; or an engine keeps the keys, and attention is biased, not causal or has sinks.
    """
    if not isinstance(module, ComposedInterfaceAttention):
        raise ValueError(
            f"attn_implementation={COMPOSED_HEADS!r} is for modules that compose_heads_of(model) has changed"
        )
    key_source = CURRENT.paged if key_source is None else key_source
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if key_source is not None:
        _refuse_beside_source(position_bias, s_aux, is_causal)
        attention_mask = None  # the source knows what each token sees
    _refuse_options(module, options, dropout, attention_mask)
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    keys = key.shape[2]
    # As for SDPA: without a mask, several queries are causal, and a single one sees all keys.
    is_causal = is_causal and attention_mask is None and query.shape[2] > 1 and not module.has_complete_masks
    if is_causal:
        key, value, attention_mask = _causal_keys(query.shape[2], key, value)
        is_causal = attention_mask is None
    pre, post = module.stages(query, keys, key.shape[2], has_sinks=s_aux is not None)
    mask = _joined_mask(attention_mask, position_bias, is_causal, key.shape[2])
    if s_aux is not None:  # sinks become one more key, before the others
        query, key, value = with_sink_key(query, key, value, s_aux, scaling)
        mask = with_visible_sink(mask)
    terms: dict[str, Any] = {} if pre is None and post is None else {"pre": pre, "post": post}
    if key_source is not None:
        terms |= {"key_source": key_source, "sliding_window": options.get("sliding_window")}
    output, maps = _call_op(module, (query, key, value), mask, scaling=scaling, is_causal=is_causal, **terms)
    return output, maps if maps is None or s_aux is None else maps[..., 1:]


def _call_op(
    module: ComposedInterfaceAttention, states: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention of queries, keys and values, which the ops need to be of one width, by the module's implementation.

    `scaling` and `is_causal` alone are options of plain attention, for which PyTorch's SDPA may be chosen.
    """
    needs_ours = not options.keys() <= {"scaling", "is_causal"}
    name = module.implementation or choose_implementation(None, states[0], mask, NO_TABLES, composed=needs_ours)
    width = max(state.shape[3] for state in states)
    padded = (_with_width(state, width) for state in states)
    output, maps = attention_function_of(name)(module, *padded, mask, **options)
    return output[..., : states[2].shape[3]], maps


def _refuse_options(
    module: ComposedInterfaceAttention, options: dict[str, Any], dropout: float, attention_mask: Tensor | None
) -> None:
    """Raises ValueError for what a call of an attention function asks for, and composed heads do not have."""
    if dropout and module.choices.drops:
        raise ValueError(dropout_error(dropout))
    if foreign := [term for term in FOREIGN_TERMS if options.get(term) is not None]:
        raise ValueError(f"attention with {foreign} cannot have composed heads; leave it out by names=[...]")
    if options.get("cache") is not None:  # a paged one, which models pass on before 5.24
        raise ValueError("continuous batching of composed heads in this model needs transformers>=5.24")
    borders = options.get("cu_seq_lens_q")
    if attention_mask is None and borders is not None and len(borders) != 2:  # two are those of a single document
        raise ValueError(
            "cu_seq_lens_q keeps no documents apart here; give position_ids alone and use_cache=False, with which "
            "Transformers makes a mask of them"
        )


def _refuse_beside_source(position_bias: Tensor | None, sinks: Tensor | None, is_causal: bool) -> None:
    """Raises ValueError for attention that a `KeySource` does not compute."""
    if position_bias is not None or sinks is not None or not is_causal:
        raise ValueError(
            "a paged cache and context parallelism serve causal attention without position bias and sinks alone; use "
            "generate(), or whole sequences"
        )


def _causal_keys(queries: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The keys and values that some queries see as in SDPA, and a mask if the ops would hide others without one.

    SDPA puts the first query at the first key, and the ops the last query at the last key.
    """
    keys = key.shape[2]
    if keys < queries:
        return key, value, torch.ones(queries, keys, dtype=torch.bool, device=key.device).tril()
    if keys > queries:  # the first tokens in a static cache, behind which it is empty
        key, value = key[:, :, :queries], value[:, :, :queries]
    return key, value, None


def _with_width(states: Tensor, width: int) -> Tensor:
    """States `[B, H, T, D]` with zeros as further channels up to `width`; `pad` would copy also those that have it."""
    return states if states.shape[3] == width else F.pad(states, (0, width - states.shape[3]))


def _joined_mask(mask: Tensor | None, bias: Tensor | None, is_causal: bool, keys: int) -> Tensor | None:
    """A mask and a bias, each broadcastable to `[B, H, T, S]`, as one mask with four dimensions.

    A bias may go on behind the `keys` that are attended to, into empty places of a static cache.
    """
    if bias is None:
        return None if mask is None else four_dimensional(mask)
    bias = bias[..., :keys]
    if is_causal:
        queries = bias.shape[-2]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=bias.device).tril(keys - queries)
    if mask is not None:
        bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
    return four_dimensional(bias)


AttentionInterface.register(COMPOSED_HEADS, attend_with_composed_heads)
