"""The arguments of a decoder's forward pass, their checks, and what its layers read: positions and packed documents."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.utils.import_utils import is_tracing

from ...configuration.field_rules import ABSOLUTE_SCHEMES
from ..caches.key_places import token_count
from ..ops.dcmha.key_source import KeySource
from .input_checks import check_attention_mask, check_position_ids, tells_padding
from .packed_documents import packed_starts, starts_by_borders


class DecoderArguments(NamedTuple):
    """The arguments of a decoder's forward pass as the caller gave them.

    Args:
        input_ids: `[B, T]` token ids; or give `inputs_embeds` `[B, T, E]`.
        attention_mask: `[B, S]`, 1 for real tokens and 0 for padding on either side; or `[B, 1, T, S]`; or one prepared
            mask for each layer type, as `generate` makes them.
        position_ids: `[B, T]`. Where neither a mask `[B, S]` nor cached tokens are given, positions that restart mark
            the documents of a packed row, which then do not see each other.
        past_key_values: a dynamic or static cache, extended in place to keep what the family's layers need.
        use_cache: whether to return the cache, and to make one where none is given.
        cu_seq_lens: `[documents + 1]`, borders of the documents packed into a single row. `position_ids` then mark no
            documents and by default restart at each border, and a mask `[B, S]` must not hide anything.
        key_source: what attends to keys that are not in the call, if anything does.
    """

    input_ids: Tensor | None
    attention_mask: Tensor | dict[str, Tensor | None] | None
    position_ids: Tensor | None
    past_key_values: Cache | None
    inputs_embeds: Tensor | None
    use_cache: bool | None
    cu_seq_lens: Tensor | None
    key_source: KeySource | None


class DecoderInputs(NamedTuple):
    """What the layers of a decoder read."""

    inputs_embeds: Tensor  # [B, T, E]
    position_ids: Tensor  # [B, T] or [1, T]
    past_key_values: Cache | None
    masks: dict[str, Tensor | None]  # one for each layer type
    document_starts: Tensor | None  # [B, T], index of the first token of each token's document; None if not packed


def check_arguments(given: DecoderArguments, inputs_embeds: Tensor) -> None:
    """Raises ValueError if positions or mask do not fit embeddings `[B, T, E]`, or the cache is of the wrong kind."""
    check_position_ids(given.position_ids, inputs_embeds)
    cache = given.past_key_values
    is_of_both = isinstance(cache, EncoderDecoderCache)  # has no layers of its own
    if is_of_both or not isinstance(cache, (Cache, type(None))):
        name = type(cache).__name__
        raise ValueError(f"past_key_values is a {name}; give a Cache, such as DynamicCache(config=config)")
    exact = cache is None and not is_tracing(inputs_embeds)  # exported sizes may differ
    check_attention_mask(given.attention_mask, inputs_embeds, cache, exact)


def refuse_later_tokens(options: dict[str, Any]) -> None:
    """Raises ValueError if `is_causal`, a keyword of the call or a field of the configuration, is False."""
    if options.get("is_causal") is False:
        raise ValueError(
            "is_causal=False is not supported: tokens of these decoders see no later ones; leave it out, or take an "
            "encoder"
        )


def packed_document_starts(given: DecoderArguments, inputs_embeds: Tensor) -> Tensor | None:
    """Index of the first token of each token's document, `[B, T]`; None where every row is one document.

    Positions are not searched for documents where a mask `[B, S]` is given, since they repeat in padding, nor where
    tokens are cached, since they continue a document, nor where a `key_source` knows what tokens see.

    Raises:
        ValueError: `cu_seq_lens` do not fit, or come with cached tokens, of which they say nothing.
    """
    if given.cu_seq_lens is not None:
        if not is_empty(given.past_key_values):
            raise ValueError(
                "cu_seq_lens gives borders of documents from the start of a cache, but past_key_values holds tokens "
                "already; leave cu_seq_lens out, or give an empty cache"
            )
        return starts_by_borders(given.cu_seq_lens, inputs_embeds)
    positions = given.position_ids
    is_known_otherwise = given.key_source is not None or tells_padding(given.attention_mask)
    if positions is None or positions.shape[-1] == 1 or is_known_otherwise:
        return None
    if not is_empty(given.past_key_values):  # asked last, because its length may have to be read from a device
        return None
    return packed_starts(positions, inputs_embeds.shape[:2])


def is_empty(cache: Cache | None) -> bool:
    """Whether a cache holds no tokens. While tracing, one whose count is a tensor is taken to hold some."""
    length = token_count(cache)
    return not (isinstance(length, Tensor) and is_tracing(length)) and int(length) == 0


def new_token_mask(attention_mask: Any, cache: Cache | None, length: int) -> Tensor | None:
    """The part `[B, T]` of a mask `[B, S]` that is of the new tokens, False for padding; None without such a mask."""
    if not tells_padding(attention_mask):
        return None
    return attention_mask.bool().index_select(1, new_columns(attention_mask, cache, length))


def new_columns(attention_mask: Tensor, cache: Cache | None, length: int) -> Tensor:
    """The columns `[T]` of the new tokens in a mask `[B, S]`: those behind the cached tokens, none beyond its end."""
    new = torch.arange(length, device=attention_mask.device) + token_count(cache)
    return new.clamp(max=attention_mask.shape[1] - 1)


def default_positions(
    config: PreTrainedConfig, attention_mask: Any, inputs_embeds: Tensor, cache: Cache | None, starts: Tensor | None
) -> Tensor:
    """Positions `[1, T]`, or `[B, T]` with padding, where the caller gave none.

    They count from 0 in each packed document, whose `starts` are `[1, T]`, and otherwise go on from the cached tokens.
    Absolute positions count only the real tokens of a mask `[B, S]`. All other schemes depend on differences of
    positions alone, which padding on the left does not change.
    """
    if starts is not None:
        return torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)[None] - starts
    is_absolute = getattr(config, "position_scheme", None) in ABSOLUTE_SCHEMES
    return count_positions(attention_mask if is_absolute else None, inputs_embeds, cache)


def count_positions(attention_mask: Any, inputs_embeds: Tensor, cache: Cache | None) -> Tensor:
    """Positions `[B, T]` of the tokens `[B, T, E]` after a cache, which count only the real tokens of a mask `[B, S]`.

    Without such a mask they are `[1, T]` and count all tokens.
    """
    length = inputs_embeds.shape[1]
    if not tells_padding(attention_mask):
        return torch.arange(length, device=inputs_embeds.device)[None] + token_count(cache)
    counted = (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)
    return counted.index_select(1, new_columns(attention_mask, cache, length))
