"""What the layers of an RCMHA model need to know about the segment of tokens that they process."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ..caches.key_places import first_query_offset, key_count, token_count
from ..ops.masking import split_mask
from ..ops.readable import is_readable


class Segment(NamedTuple):
    """A segment of `T` tokens.

    Layers project `N` tokens to keys and values: the `M` tokens of the memory too with `memory_type="segment"`
    (`N = M + T`), otherwise only the segment (`N = T`).
    """

    length: int  # T
    query_offset: Tensor | None = None  # see `first_query_offset`
    token_mask: Tensor | None = None  # [B, N], False for padding; None without padding
    document_positions: Tensor | None = None  # [B, T], positions from 0 in each document, if a row packs several
    rotary: tuple[Tensor, Tensor] | None = None  # cosines and sines [B, N, D]
    scheme_bias: Tensor | None = None  # [S, H], what ALiBi or T5 adds to scaled scores at each distance


def describe_segment(
    config: PreTrainedConfig,
    inputs_embeds: Tensor,
    cache: Cache | None,
    mask: Tensor | None,
    *,
    given_mask: Any,
    document_starts: Tensor | None = None,
) -> Segment:
    """Derives a segment, without what position schemes add, from the inputs of a decoder.

    Args:
        inputs_embeds: `[B, T, E]`.
        cache: the memory of earlier segments.
        mask: the mask of the layers, `[B, 1, T, S]` or None.
        given_mask: the `attention_mask` that the caller gave.
        document_starts: `[B, T]`, index of the first token of each token's document; None if every row is one document.

    Raises:
        ValueError: the segment reaches over more keys than the relative position tables have rows.
    """
    length = inputs_embeds.shape[1]
    keys = key_count(cache, 0, length)
    document_positions = None
    if document_starts is not None:
        document_positions = torch.arange(length, device=inputs_embeds.device) - document_starts
    check_relative_reach(config, length, keys, document_positions)
    query_offset = first_query_offset(cache, 0, length)
    read = keys if config.memory_type == "segment" else length
    end = length + token_count(cache)
    token_mask = real_token_mask(given_mask, mask, length, read, query_offset, end) if config.convolves else None
    return Segment(length, query_offset, token_mask, document_positions)


def real_token_mask(
    given_mask: Any, mask: Tensor | None, length: int, read: int, query_offset: Tensor | None, end: int | Tensor
) -> Tensor | None:
    """Which of the `read` positions before `end` hold a token and not padding, `[B, read]`; None where all do.

    Convolutions read zeros in place of padding. Padding between tokens would still count as distance, so batches are
    padded on the left. Of a complete mask `[B, 1, T or 1, S]` from the caller the diagonal is read: a padded token does
    not see even itself. A single new token is never padding.
    """
    if isinstance(given_mask, Tensor) and given_mask.ndim == 2:
        columns = torch.arange(-read, 0, device=given_mask.device) + end
        tokens = given_mask.index_select(1, columns.clamp(max=given_mask.shape[1] - 1)).bool()
        return None if is_readable(tokens) and bool(tokens.all()) else tokens
    if not isinstance(given_mask, (Tensor, dict)) or mask is None or length == 1:
        return None
    visible, _ = split_mask(mask)
    queries = torch.arange(length, device=mask.device)
    itself = queries + (mask.shape[-1] - length if query_offset is None else query_offset)
    # A mask with other sizes than those of the call is left for the op to refuse.
    rows, columns = (index.clamp(0, size - 1) for index, size in zip((queries, itself), mask.shape[2:], strict=True))
    tokens = visible[:, 0, rows, columns]  # type: ignore[index]
    return torch.cat([tokens.new_ones(tokens.shape[0], read - length), tokens], dim=1)


def check_relative_reach(config: PreTrainedConfig, length: int, keys: int, document_positions: Tensor | None) -> None:
    """Raises ValueError if a segment reaches over more keys than the relative position tables have rows.

    Of packed documents only the longest counts. Its length is read from `document_positions` `[B, T]`, which makes the
    host wait for the device; where values cannot be read, the check is skipped.
    """
    limit = config.max_position_embeddings
    if not config.is_relative or config.sliding_window is not None or keys <= limit:
        return
    if document_positions is not None:
        if not is_readable(document_positions):
            return
        length = keys = int(document_positions.max()) + 1
    if keys > limit:
        raise ValueError(
            f"a segment of {length} tokens reaches over {keys} keys, memory included, but the relative position tables "
            f"end at max_position_embeddings ({limit}); use shorter segments, a smaller cache or mem_len"
        )
