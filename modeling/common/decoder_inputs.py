"""From what a caller hands to a decoder to what its layers read. Errors name the value, the limit and the fix."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.utils.import_utils import is_tracing

from .packed_documents import document_positions, document_starts

MASK_MAKERS: dict[str, Callable[..., Any]] = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
}


class DecoderInputs(NamedTuple):
    """What every layer of a decoder reads."""

    inputs_embeds: Tensor  # [B, T, E]
    position_ids: Tensor  # [B, T] or [1, T]
    past_key_values: Cache | None
    masks: dict[str, Tensor | None]  # one for each layer type
    first_keys: Tensor | None = None  # [B, T], the first key that each query sees; None where documents are not packed


def prepare_decoder_inputs(
    config: PreTrainedConfig,
    embed_tokens: nn.Module,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | dict[str, Tensor | None] | None,
    position_ids: Tensor | None,
    past_key_values: Cache | None,
    use_cache: bool | None,
    cu_seq_lens: Tensor | None = None,
) -> DecoderInputs:
    """Checks the arguments of a decoder's forward, and fills in what the caller left out.

    Args:
        input_ids: `[B, T]` token ids; or give `inputs_embeds` `[B, T, E]`.
        attention_mask: `[B, S]`, 1 for real tokens and 0 for padding on either side; or `[B, 1, T, S]`; or one prepared
            mask for each layer type, as `generate` makes them.
        position_ids: `[B, T]`. Restarting at 0 packs documents that do not see each other, where neither a mask nor a
            cache is given.
        cu_seq_lens: `[documents + 1]` borders of the documents of one packed row, the other way to say the same; a mask
            that hides nothing is then ignored.

    Raises:
        ValueError: shapes that do not fit, or a row of the batch that is all padding.
    """
    check_tokens(input_ids, inputs_embeds)
    if inputs_embeds is None:
        inputs_embeds = embed_tokens(input_ids)
    check_attention_mask(attention_mask, inputs_embeds)
    if cu_seq_lens is not None and past_key_values is None:
        position_ids = document_positions(cu_seq_lens, inputs_embeds)
        if isinstance(attention_mask, Tensor) and bool(attention_mask.all()):
            attention_mask = None
    # Transformers looks for packed documents only where it is told of no cache, and a new one is as good as none.
    given_cache = past_key_values
    if use_cache and past_key_values is None:
        past_key_values = DynamicCache(config=config)
    first_keys, may_be_packed = None, attention_mask is None and given_cache is None
    if may_be_packed and position_ids is not None and getattr(config, "composes", False):
        first_keys = document_starts(position_ids).expand(inputs_embeds.shape[:2])
    if position_ids is None:
        seen = past_key_values.get_seq_length() if past_key_values is not None else 0
        position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + seen).unsqueeze(0)
    if isinstance(attention_mask, dict):
        return DecoderInputs(inputs_embeds, position_ids, past_key_values, attention_mask)
    masks = {
        layer_type: MASK_MAKERS[layer_type](
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=given_cache,
            position_ids=position_ids if first_keys is None else None,  # a mask of all pairs would say the same
        )
        for layer_type in sorted(set(config.layer_types))
    }
    return DecoderInputs(inputs_embeds, position_ids, past_key_values, masks, first_keys)


def check_tokens(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> None:
    """Raises ValueError unless exactly one input is given, `[B, T]` ids or `[B, T, E]` embeddings, with T >= 1."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give exactly one of input_ids and inputs_embeds")
    name, given, expected = ("input_ids", input_ids, "[batch, length]")
    if given is None:
        name, given, expected = ("inputs_embeds", inputs_embeds, "[batch, length, hidden_size]")
    if given.ndim != expected.count(",") + 1 or given.shape[1] == 0:  # type: ignore[union-attr]
        shape = tuple(given.shape)  # type: ignore[union-attr]
        raise ValueError(f"{name} must be {expected} with at least one token, not of shape {shape}")


def check_attention_mask(attention_mask: Any, inputs_embeds: Tensor) -> None:
    """Raises ValueError where a `[B, S]` mask does not fit the batch, or hides a whole row of it.

    Masks of four dimensions and prepared ones are the caller's own business. Values are looked at for prompts only, and
    never while tracing: reading them would stall a decoding loop.
    """
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim == 4:
        return
    batch, length = inputs_embeds.shape[:2]
    if attention_mask.ndim != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < length:
        raise ValueError(
            f"attention_mask of shape {tuple(attention_mask.shape)} does not fit {batch} rows of {length} tokens; "
            "give one value for each cached and new token"
        )
    if length == 1 or is_tracing(attention_mask):
        return
    hidden_rows = (~attention_mask.bool().any(dim=-1)).nonzero().flatten().tolist()
    if hidden_rows:
        raise ValueError(f"attention_mask hides every token of rows {hidden_rows}; drop those rows from the batch")
