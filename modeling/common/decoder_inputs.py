"""Checks the arguments of a decoder's forward pass and completes them to what its layers read."""

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


class DecoderArguments(NamedTuple):
    """The arguments of a decoder's forward pass as the caller gave them.

    Args:
        input_ids: `[B, T]` token ids; or give `inputs_embeds` `[B, T, E]`.
        attention_mask: `[B, S]`, 1 for real tokens and 0 for padding on either side; or `[B, 1, T, S]`; or one prepared
            mask for each layer type, as `generate` makes them.
        position_ids: `[B, T]`. Where neither a mask nor a cache is given, positions that restart at 0 pack documents,
            which then do not see each other.
        past_key_values: a dynamic or static cache, extended in place to keep what the family's layers need.
        use_cache: whether to make and return a cache where none is given.
        cu_seq_lens: `[documents + 1]` borders of the documents packed into a single row, instead of `position_ids`. A
            mask that hides nothing is then ignored.
    """

    input_ids: Tensor | None
    attention_mask: Tensor | dict[str, Tensor | None] | None
    position_ids: Tensor | None
    past_key_values: Cache | None
    inputs_embeds: Tensor | None
    use_cache: bool | None
    cu_seq_lens: Tensor | None = None


class DecoderInputs(NamedTuple):
    """What the layers of a decoder read."""

    inputs_embeds: Tensor  # [B, T, E]
    position_ids: Tensor  # [B, T] or [1, T]
    past_key_values: Cache | None
    masks: dict[str, Tensor | None]  # one for each layer type
    first_keys: Tensor | None  # [B, T], the first key that each query sees; None where documents are not packed


def prepare_decoder_inputs(
    config: PreTrainedConfig,
    embed_tokens: nn.Module,
    given: DecoderArguments,
    prepare_cache: Callable[[Cache], None],
) -> DecoderInputs:
    """Checks the arguments of a decoder's forward pass and fills in what the caller left out.

    Args:
        embed_tokens: maps token ids `[B, T]` to embeddings `[B, T, E]`.
        prepare_cache: is called with the given or new cache before its length is read.

    Raises:
        ValueError: shapes that do not fit, or a batch row that is all padding.
    """
    check_tokens(given.input_ids, given.inputs_embeds)
    inputs_embeds = embed_tokens(given.input_ids) if given.inputs_embeds is None else given.inputs_embeds
    check_attention_mask(given.attention_mask, inputs_embeds)
    if given.cu_seq_lens is not None and given.past_key_values is None:
        given = with_document_positions(given, given.cu_seq_lens, inputs_embeds)
    cache = given.past_key_values
    if given.use_cache and cache is None:
        cache = DynamicCache(config=config)
    if cache is not None:
        prepare_cache(cache)
    position_ids, first_keys = given.position_ids, packed_first_keys(config, given, inputs_embeds)
    if position_ids is None:
        past_tokens = cache.get_seq_length() if cache is not None else 0
        position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_tokens).unsqueeze(0)
    masks = given.attention_mask
    if not isinstance(masks, dict):
        # A complete mask would repeat what `first_keys` says, in memory quadratic in the length.
        masks = make_masks(config, given, inputs_embeds, position_ids if first_keys is None else None)
    return DecoderInputs(inputs_embeds, position_ids, cache, masks, first_keys)


def may_pack_documents(given: DecoderArguments) -> bool:
    """Whether the caller's positions or borders may pack several documents into one row; not beside a cache."""
    return given.past_key_values is None and (given.position_ids is not None or given.cu_seq_lens is not None)


def with_document_positions(given: DecoderArguments, cu_seq_lens: Tensor, inputs_embeds: Tensor) -> DecoderArguments:
    """Replaces borders `[documents + 1]` of packed documents by positions `[1, T]`; drops a mask that hides nothing."""
    attention_mask = given.attention_mask
    if isinstance(attention_mask, Tensor) and bool(attention_mask.all()):
        attention_mask = None
    position_ids = document_positions(cu_seq_lens, inputs_embeds)
    return given._replace(attention_mask=attention_mask, position_ids=position_ids)


def packed_first_keys(config: PreTrainedConfig, given: DecoderArguments, inputs_embeds: Tensor) -> Tensor | None:
    """The first key that each query sees, `[B, T]`; None where documents cannot be packed or a mask has to say it.

    Only the ops with composed heads take first keys.
    """
    if given.position_ids is None or given.attention_mask is not None or given.past_key_values is not None:
        return None
    if not getattr(config, "composes", False):
        return None
    return document_starts(given.position_ids).expand(inputs_embeds.shape[:2])


def make_masks(
    config: PreTrainedConfig, given: DecoderArguments, inputs_embeds: Tensor, position_ids: Tensor | None
) -> dict[str, Tensor | None]:
    """Transformers' mask for each layer type of the model, in the form that its attention implementation takes.

    Transformers looks for packed documents in `position_ids` `[B, T]` only where it is given no cache, so it gets the
    caller's cache and not a new, empty one.
    """
    return {
        layer_type: MASK_MAKERS[layer_type](
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=given.attention_mask,
            past_key_values=given.past_key_values,
            position_ids=position_ids,
        )
        for layer_type in sorted(set(config.layer_types))
    }


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
    """Raises ValueError if a `[B, S]` mask does not fit embeddings `[B, T, E]`, or hides a whole row of the batch.

    Masks `[B, 1, T, S]` and prepared masks are not checked. The values of a mask are read for prompts only and never
    while tracing, because reading them makes a decoding loop wait for the device.
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
