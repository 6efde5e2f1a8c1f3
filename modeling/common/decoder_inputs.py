"""Checks the arguments of a decoder's forward pass and completes them to what its layers read."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.utils.import_utils import is_tracing

from ..positions.absolute import ABSOLUTE_SCHEMES
from .packed_documents import starts_by_borders, starts_by_positions

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
        position_ids: `[B, T]`. Where neither a mask `[B, S]` nor cached tokens are given, positions that restart pack
            documents, which then do not see each other.
        past_key_values: a dynamic or static cache, extended in place to keep what the family's layers need.
        use_cache: whether to make and return a cache where none is given.
        cu_seq_lens: `[documents + 1]` borders of the documents packed into a single row; `position_ids` are then only
            positions, and by default restart at each border. A mask `[B, S]` that hides nothing is then ignored.
        paged: a serving engine's `PagedAttention`, which has the earlier tokens.
    """

    input_ids: Tensor | None
    attention_mask: Tensor | dict[str, Tensor | None] | None
    position_ids: Tensor | None
    past_key_values: Cache | None
    inputs_embeds: Tensor | None
    use_cache: bool | None
    cu_seq_lens: Tensor | None = None
    paged: Any = None


class DecoderInputs(NamedTuple):
    """What the layers of a decoder read."""

    inputs_embeds: Tensor  # [B, T, E]
    position_ids: Tensor  # [B, T] or [1, T]
    past_key_values: Cache | None
    masks: dict[str, Tensor | None]  # one for each layer type
    document_starts: Tensor | None  # [B, T], index of the first token of each token's document; None if not packed


def prepare_decoder_inputs(
    config: PreTrainedConfig,
    embed_tokens: nn.Module,
    given: DecoderArguments,
    prepare_cache: Callable[[Cache], None],
    make_masks: Callable[[DecoderArguments, Tensor, Tensor | None], dict[str, Tensor | None]],
) -> DecoderInputs:
    """Checks the arguments of a decoder's forward pass and fills in what the caller left out.

    Args:
        embed_tokens: maps token ids `[B, T]` to embeddings `[B, T, E]`.
        prepare_cache: is called with the given or new cache before its length is read.
        make_masks: makes the masks of the layer types, from the arguments, the embeddings `[B, T, E]` and the starts of
            packed documents `[B, T]`.

    Raises:
        ValueError: shapes that do not fit, a batch row that is all padding, or padding between packed documents.
    """
    check_tokens(given.input_ids, given.inputs_embeds)
    inputs_embeds = embed_tokens(given.input_ids) if given.inputs_embeds is None else given.inputs_embeds
    check_attention_mask(given.attention_mask, inputs_embeds, given.past_key_values)
    starts = packed_document_starts(given, inputs_embeds)
    if starts is not None and given.cu_seq_lens is not None:
        given = given._replace(attention_mask=mask_beside_borders(given.attention_mask))
    cache = given.past_key_values
    if given.use_cache and cache is None:
        cache = DynamicCache(config=config)
    if cache is not None:
        prepare_cache(cache)
    position_ids = given.position_ids
    if position_ids is None:
        position_ids = default_positions(config, given.attention_mask, inputs_embeds, cache, starts)
    masks = given.attention_mask
    if not isinstance(masks, dict):
        masks = make_masks(given, inputs_embeds, starts)
    return DecoderInputs(inputs_embeds, position_ids, cache, masks, starts)


def may_pack_documents(given: DecoderArguments) -> bool:
    """Whether the caller's positions or borders may pack several documents into one row, as far as tokens allow."""
    if given.cu_seq_lens is not None:
        return True
    positions_tell = given.attention_mask is None or is_complete_mask(given.attention_mask)
    return positions_tell and given.position_ids is not None and given.position_ids.shape[-1] > 1


def packed_document_starts(given: DecoderArguments, inputs_embeds: Tensor) -> Tensor | None:
    """Index of the first token of each token's document, `[B, T]`; None where every row is one document.

    Beside a mask `[B, S]` positions repeat because of padding, and beside cached tokens they continue a document.
    """
    if not may_pack_documents(given) or not is_empty(given.past_key_values):
        return None
    if given.cu_seq_lens is not None:
        return starts_by_borders(given.cu_seq_lens, inputs_embeds)
    starts = starts_by_positions(given.position_ids).expand(inputs_embeds.shape[:2])  # type: ignore[arg-type]
    return starts if is_tracing(starts) or bool(starts.any()) else None


def is_empty(cache: Cache | None) -> bool:
    """Whether a cache holds no tokens. One that counts them on the device is not asked while tracing."""
    length: Any = 0 if cache is None else cache.get_seq_length()
    return not (isinstance(length, Tensor) and is_tracing(length)) and int(length) == 0


def is_complete_mask(attention_mask: Any) -> bool:
    """Whether a mask says of every query and key whether they see each other: `[B, 1, T, S]`, or prepared masks."""
    return isinstance(attention_mask, dict) or getattr(attention_mask, "ndim", 0) == 4


def mask_beside_borders(attention_mask: Any) -> Any:
    """The caller's mask, without one `[B, S]` that hides nothing.

    Raises:
        ValueError: a mask `[B, S]` hides tokens.
    """
    if attention_mask is None or is_complete_mask(attention_mask):
        return attention_mask
    if not attention_mask.all():
        raise ValueError(
            f"attention_mask hides {int((attention_mask == 0).sum())} tokens of documents packed by cu_seq_lens; drop "
            "those tokens from the row, or make a document of them"
        )
    return None


def default_positions(
    config: PreTrainedConfig, attention_mask: Any, inputs_embeds: Tensor, cache: Cache | None, starts: Tensor | None
) -> Tensor:
    """Positions `[1, T]`, or `[B, T]` with padding, where the caller gave none.

    They go on from the cached tokens, or from `starts` `[1, T]`, those of packed documents. Absolute positions count
    the real tokens of a mask `[B, S]`; to all other schemes only differences matter, which padding on the left leaves.
    """
    length = inputs_embeds.shape[1]
    padded = isinstance(attention_mask, Tensor) and not is_complete_mask(attention_mask)
    if padded and getattr(config, "position_scheme", None) in ABSOLUTE_SCHEMES:
        return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, -length:]
    indices = torch.arange(length, device=inputs_embeds.device)[None]
    if starts is not None:
        return indices - starts
    return indices + (cache.get_seq_length() if cache is not None else 0)


def make_causal_masks(
    config: PreTrainedConfig, given: DecoderArguments, inputs_embeds: Tensor, starts: Tensor | None
) -> dict[str, Tensor | None]:
    """Transformers' mask for each layer type of the model, in the form that its attention implementation takes.

    `starts` `[B, T]` keep packed documents apart, except in models that run with our ops, which take them directly:
    a complete mask would need memory quadratic in the length. Transformers' own search for packed documents would take
    every jump of the positions for a border, so it gets none.
    """
    takes_starts = getattr(config, "composes", False) or getattr(config, "has_distance_tables", False)
    apart = None if starts is None or takes_starts else same_document(starts)
    return {
        layer_type: MASK_MAKERS[layer_type](
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=given.attention_mask,
            past_key_values=given.past_key_values,
            and_mask_function=apart,
        )
        for layer_type in sorted(set(config.layer_types))
    }


def same_document(starts: Tensor) -> Callable[..., Tensor]:
    """A mask function for Transformers: a query sees no key before the start of its document, in `starts` `[B, T]`."""

    def mask_function(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether a query sees a key, all four given as index `[]`; returns `[]`."""
        return key >= starts[batch, query]

    return mask_function


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


def check_attention_mask(attention_mask: Any, inputs_embeds: Tensor, cache: Cache | None) -> None:
    """Raises ValueError if a `[B, S]` mask does not fit embeddings `[B, T, E]`, or hides a whole row of the batch.

    Masks `[B, 1, T, S]` and prepared masks are not checked. Beside a cache the values of a mask are not read: the first
    chunk of a prompt may be all padding in a short row, and reading makes a decoding loop wait for the device.
    """
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim == 4:
        return
    batch, length = inputs_embeds.shape[:2]
    if attention_mask.ndim != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < length:
        raise ValueError(
            f"attention_mask of shape {tuple(attention_mask.shape)} does not fit {batch} rows of {length} tokens; "
            "give one value for each cached and new token"
        )
    if cache is not None or length == 1 or is_tracing(attention_mask):
        return
    hidden_rows = (~attention_mask.bool().any(dim=-1)).nonzero().flatten().tolist()
    if hidden_rows:
        raise ValueError(f"attention_mask hides every token of rows {hidden_rows}; drop those rows from the batch")
