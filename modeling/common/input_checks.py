"""Checks of what callers give to encoders and decoders: special tokens, and tokens, positions, masks and caches."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, StaticLayer
from transformers.utils.import_utils import is_tracing

from ..caches.key_places import known_token_count, token_count
from ..ops.readable import is_readable
from ..ops.validation import check_mask_dtype
from ..positions.rotary import longrope_borders


def check_special_tokens(config: PreTrainedConfig, *names: str) -> None:
    """Raises ValueError if a field of these `names`, an id or a list of ids, has one that is not in the vocabulary.

    Such an id would end in an error of PyTorch when the model is made, trained or generates. None is no token.
    """
    rows = config.vocab_size
    for name in names:
        given = getattr(config, name)
        for token in given if isinstance(given, list) else [given]:
            if token is not None and not 0 <= token < rows:
                raise ValueError(
                    f"{name} ({token}) must be at least 0 and smaller than vocab_size ({rows}); give that of the "
                    "tokenizer"
                )


def check_tokens(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> None:
    """Raises ValueError unless exactly one input is given, `[B, T]` ids or `[B, T, E]` embeddings, with T >= 1."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give exactly one of input_ids and inputs_embeds")
    if input_ids is not None and (input_ids.ndim != 2 or input_ids.shape[1] == 0):
        shape = tuple(input_ids.shape)
        raise ValueError(f"input_ids must be [batch, length] with at least one token, not of shape {shape}")
    if inputs_embeds is not None and (inputs_embeds.ndim != 3 or inputs_embeds.shape[1] == 0):
        shape = tuple(inputs_embeds.shape)
        raise ValueError(
            f"inputs_embeds must be [batch, length, hidden_size] with at least one token, not of shape {shape}"
        )


def check_position_ids(position_ids: Tensor | None, inputs_embeds: Tensor) -> None:
    """Raises ValueError unless positions are `[B, T]` or `[1, T]` for embeddings `[B, T, E]`; not while tracing."""
    if position_ids is None or is_tracing(inputs_embeds):
        return
    batch, length = inputs_embeds.shape[:2]
    if tuple(position_ids.shape) not in ((batch, length), (1, length)):
        shape = tuple(position_ids.shape)
        raise ValueError(
            f"position_ids of shape {shape} must be [{batch}, {length}] or [1, {length}], one position for each token"
        )


def check_longrope_border(config: Any, position_ids: Tensor, cache: Cache | None) -> None:
    """Raises ValueError if tokens at positions `[.., T]` outgrow LongRoPE's short factors, which cached keys have.

    `generate` reads the whole text again before that. Of a batch the longest row counts. Where values cannot be read,
    the check is skipped.
    """
    # Not to be sought while a graph is traced: compilers cannot follow how a configuration finds them.
    if cache is None or not is_readable(position_ids):
        return
    borders = longrope_borders(config)
    if not borders or not int(token_count(cache)):
        return
    before, end = int(position_ids[:, 0].max()), int(position_ids.max()) + 1
    for border in borders:
        if 0 < before <= border < end:
            raise ValueError(
                f"{end - before} new tokens after {before} cached ones would take the keys of LongRoPE's short factors "
                f"beyond original_max_position_embeddings ({border}); read all tokens in one call, without cached ones"
            )


def check_attention_mask(attention_mask: Any, inputs_embeds: Tensor, cache: Cache | None, exact: bool) -> None:
    """Raises ValueError if a `[B, S]` mask does not fit embeddings `[B, T, E]`, or hides a whole row of the batch.

    Of masks `[B, 1, T, S]` only dtype and rows are checked, since the op checks the rest; of prepared masks nothing.
    With a cache only the shape is checked, because a short row may be all padding in the first chunk of a prompt, and
    because reading values makes decoding wait for the device.

    Args:
        exact: whether the mask must be of the tokens of `inputs_embeds` alone, and not of cached ones before them.
    """
    if not isinstance(attention_mask, Tensor):
        return
    batch, length = inputs_embeds.shape[:2]
    shape = tuple(attention_mask.shape)
    if len(shape) == 4:
        check_mask_dtype(attention_mask)
        if shape[0] not in (1, batch):
            raise ValueError(f"attention_mask of shape {shape} does not fit {batch} rows; give [{batch}, 1, T, S]")
        return
    if len(shape) != 2 or shape[0] != batch or shape[1] < length or (exact and shape[1] > length):
        raise ValueError(
            f"attention_mask of shape {shape} does not fit {batch} rows of {length} tokens; give one value for each "
            f"{'token' if exact else 'cached and new token'}"
        )
    if cache is not None or length == 1 or not is_readable(attention_mask):
        return
    hidden_rows = (~attention_mask.bool().any(dim=-1)).nonzero().flatten().tolist()
    if hidden_rows:
        raise ValueError(f"attention_mask hides every token of rows {hidden_rows}; drop those rows from the batch")


def check_layer_masks(masks: Mapping[str, Any], layer_types: Iterable[str]) -> None:
    """Raises ValueError unless prepared masks have one, or None, for each of the layer types."""
    if missing := sorted(set(layer_types) - set(masks)):
        raise ValueError(f"attention_mask has no mask for the layer types {missing}; give one for each, or None")


def is_complete_mask(attention_mask: Any) -> bool:
    """Whether a mask has an entry for every pair of query and key: `[B, 1, T, S]`, or masks prepared by the caller."""
    return isinstance(attention_mask, dict) or getattr(attention_mask, "ndim", 0) == 4


def tells_padding(attention_mask: Any) -> bool:
    """Whether a mask has an entry for each token, `[B, S]`, which tells padding from tokens; complete masks do not."""
    return isinstance(attention_mask, Tensor) and attention_mask.ndim == 2


def mask_beside_borders(attention_mask: Any) -> Any:
    """The caller's mask beside `cu_seq_lens`: a mask `[B, S]` must hide nothing and is dropped.

    Where values cannot be read, the mask is taken to hide nothing.

    Raises:
        ValueError: a mask `[B, S]` hides tokens.
    """
    if not tells_padding(attention_mask):
        return attention_mask
    if is_readable(attention_mask) and not attention_mask.all():
        raise ValueError(
            f"attention_mask hides {int((attention_mask == 0).sum())} tokens of documents packed by cu_seq_lens; drop "
            "those tokens from the row, or make a document of them"
        )
    return None


def check_cached_length(attention_mask: Any, inputs_embeds: Tensor, cache: Cache, window: int | None = None) -> None:
    """Raises ValueError if a `[B, S]` mask has no columns, or a static cache no places, for new tokens `[B, T, ..]`.

    Masks `[B, 1, T, S]` and prepared masks are not checked. The check is skipped while tracing, and where the number of
    cached tokens would have to be read from a device.

    Args:
        window: of the sliding layers. A static cache with at least as many places never runs out of them in these
            layers. With fewer places it would drop tokens that others still see.
    """
    past = None if is_tracing(inputs_embeds) else known_token_count(cache)
    if past is None:
        return
    length = inputs_embeds.shape[1]
    if tells_padding(attention_mask) and attention_mask.shape[1] < past + length:
        raise ValueError(
            f"attention_mask has {attention_mask.shape[1]} columns for {past} cached and {length} new tokens; "
            f"give {past + length}"
        )
    static = [layer for layer in cache.layers if isinstance(layer, StaticLayer)]
    rooms = [layer.max_cache_len for layer in static if not layer.is_sliding or layer.max_cache_len < (window or 0)]
    if rooms and rooms[0] < past + length:
        raise ValueError(
            f"past_key_values has room for max_cache_len={rooms[0]} tokens, and {past} cached and {length} new ones "
            f"come to {past + length}; make it with max_cache_len={past + length} or more"
        )


def check_batch(batch: int, cache: Cache | None) -> None:
    """Raises ValueError if `cache` holds tokens of another number of rows; a quantized layer does not tell."""
    layer: Any = cache.layers[0] if cache is not None and cache.layers else None
    if layer is not None and layer.is_initialized and layer.keys.ndim == 4 and layer.keys.shape[0] != batch:
        raise ValueError(
            f"past_key_values is of a batch of {layer.keys.shape[0]} rows and the input of {batch}; "
            "continue with the rows that it came from, repeat them for beams or several sequences "
            "(past_key_values.batch_repeat_interleave), or start without it"
        )
