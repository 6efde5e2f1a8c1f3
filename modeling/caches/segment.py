"""What the layers of an RCMHA model know about the segment that they work on."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, StaticLayer
from transformers.utils.import_utils import is_tracing

from ..ops.masking import split_mask


class Segment(NamedTuple):
    """A segment of `T` tokens; with segment memory, of `M + T` rows."""

    length: int
    offset: Tensor | None  # position of the first query among the keys, where they are preallocated
    tokens: Tensor | None  # [B, rows], False where there is padding and no token; None where there is none
    document_positions: Tensor | None  # [B, T], where several documents may share a row
    rotary: tuple[Tensor, Tensor] | None  # cosines and sines [B, rows, D]


def describe_segment(
    config: PreTrainedConfig,
    inputs_embeds: Tensor,
    position_ids: Tensor,
    cache: Cache | None,
    mask: Tensor | None,
    given: tuple[Any, Cache | None],
    packed: bool,
    rotary_emb: nn.Module | None,
) -> Segment:
    """Works out a segment from a decoder's inputs.

    Args:
        mask: the mask of the layers, `[B, 1, T, S]` or None.
        given: the caller's own `attention_mask` and cache.
        packed: the caller gave positions, which may restart within a row.

    Raises:
        ValueError: the segment does not fit its memory, its batch or the positions of the model.
    """
    attention_mask, given_cache = given
    length = inputs_embeds.shape[1]
    seen = cache.get_seq_length() if cache is not None else 0
    keys, first_key = cache.get_mask_sizes(length, 0) if cache is not None else (length, 0)
    packs = given_cache is None and packed
    check_batch(inputs_embeds.shape[0], cache)
    check_positions(config, length, seen, keys, position_ids if packs else None)
    offset = key_offset(cache, length, keys, first_key)
    rows = keys if config.memory_type == "segment" else length
    tokens = real_tokens(attention_mask, mask, length, rows, offset) if config.convolves else None
    rotary = None
    if rotary_emb is not None:
        row_positions = position_ids if rows == length else torch.arange(rows, device=inputs_embeds.device)[None]
        rotary = rotary_emb(inputs_embeds, row_positions)
    return Segment(length, offset, tokens, position_ids if packs else None, rotary)


def key_offset(cache: Cache | None, length: int, keys: int, first_key: int) -> Tensor | None:
    """Position of the first query among `keys` keys; None where the queries end where the keys end."""
    layer = cache.layers[0] if cache is not None and cache.layers else None
    if not isinstance(layer, StaticLayer):
        return None
    seen = getattr(layer, "cumulative_length_int", None)
    if seen is not None and seen - first_key + length == keys:
        return None
    # The layers count on while they work, and this must not.
    return layer.cumulative_length.clone()


def real_tokens(
    attention_mask: Any, mask: Tensor | None, length: int, rows: int, offset: Tensor | None
) -> Tensor | None:
    """Which of the last `rows` rows are tokens and not padding, `[B, rows]`; None where all are.

    Convolutions see nothing in the other rows. Between tokens they are holes, which distances count: pad on the left.
    A prepared mask says so too: a padded token does not see itself. Single tokens are never padding.
    """
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        tokens = attention_mask[:, -rows:].bool()
        return None if not is_tracing(tokens) and bool(tokens.all()) else tokens
    if not isinstance(attention_mask, (Tensor, dict)) or mask is None or length == 1:
        return None
    visible, _ = split_mask(mask)
    queries = torch.arange(length, device=mask.device)
    itself = queries + (mask.shape[-1] - length if offset is None else offset)
    tokens = visible[:, 0, queries, itself]  # type: ignore[index]
    return torch.cat([tokens.new_ones(tokens.shape[0], rows - length), tokens], dim=1)


def check_batch(batch: int, cache: Cache | None) -> None:
    """Raises ValueError where the memory is of another batch."""
    layer: Any = cache.layers[0] if cache is not None and cache.layers else None
    if layer is not None and layer.is_initialized and layer.keys.shape[0] != batch:
        raise ValueError(
            f"the memory is of a batch of {layer.keys.shape[0]} rows and the segment of {batch}; "
            "continue with the rows that it came from, or start without memory"
        )


def check_positions(
    config: PreTrainedConfig, length: int, seen: Any, keys: int, document_positions: Tensor | None
) -> None:
    """Raises ValueError where a segment reaches over more than the model has positions for.

    Documents that share a row reach no further than themselves; their positions are read, but not while tracing.
    """
    limit = config.max_position_embeddings
    if document_positions is not None:
        if max(length, keys) <= limit or is_tracing(document_positions):
            return
        keys = int(document_positions.max()) + 1
        seen, length = 0, keys
    if config.is_relative and config.sliding_window is None and keys > limit:
        raise ValueError(
            f"a segment of {length} tokens reaches over {keys} keys, memory included, but the relative position tables "
            f"end at max_position_embeddings ({limit}); use shorter segments, a smaller cache or mem_len"
        )
    if config.position_scheme == "learned" and isinstance(seen, int) and seen + length > limit:
        raise ValueError(
            f"a segment of {length} tokens after {seen} others needs {seen + length} learned positions, but there are "
            f"max_position_embeddings ({limit}); start again without memory, or use another position_scheme"
        )
