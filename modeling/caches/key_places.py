"""Which keys a layer of a cache returns: how many, where the new tokens are among them, and whether any are lost."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, StaticLayer
from transformers.utils.import_utils import is_tracing


def key_count(cache: Cache | None, layer: int, length: int) -> int:
    """Number of keys that a layer returns to `length` new tokens, unused places of a static cache included."""
    return length if cache is None else cache.get_mask_sizes(length, layer)[0]


def token_count(cache: Cache | None) -> int | Tensor:
    """Number of tokens in a cache, 0 without one; a tensor `[]` where a layer counts on the device."""
    return 0 if cache is None else cache.get_seq_length()


def known_token_count(cache: Cache) -> int | None:
    """Number of tokens in a cache; None if it would have to be read from a device other than the CPU."""
    layers: list[Any] = cache.layers
    lengths = [layer.get_seq_length() for layer in layers] or [0]
    known = (int(length) for length in lengths if not isinstance(length, Tensor) or length.device.type == "cpu")
    return next(known, None)


def first_query_offset(cache: Cache | None, layer: int, length: int) -> Tensor | None:
    """Position of the first of `length` new tokens among the keys that a layer returns, `[]`.

    None if the last new token is the last key, which is what the ops assume. Only a static cache returns more keys,
    unused places, behind it. To be called before the layer appends the tokens.
    """
    found = cache.layers[layer] if cache is not None and layer < len(cache.layers) else None
    if cache is None or not isinstance(found, StaticLayer):
        return None
    keys, first_key = cache.get_mask_sizes(length, layer)
    past_tokens = getattr(found, "cumulative_length_int", None)
    if past_tokens is not None and past_tokens - first_key + length == keys:
        return None
    # A copy, because the layer updates its count in place when it appends the tokens.
    return found.cumulative_length.clone()


def refuse_tokens(layer: CacheLayerMixin, missing: str) -> None:
    """Raises ValueError if a plain layer of a cache holds tokens already; `missing` names what it lacks of them."""
    if layer.is_initialized and int(layer.get_seq_length()) > 0:
        raise ValueError(
            f"the cache holds {int(layer.get_seq_length())} tokens without {missing}; "
            "start with an empty cache, or one that a model of this configuration filled; "
            "with PEFT, use prompt tuning or p-tuning instead of prefix tuning"
        )


def past_tokens_within(cache: Cache | None, length: int, limit: int) -> int | None:
    """Number of tokens in a cache, for a check that `length` more stay within `limit`; None where nothing is to check.

    A static cache counts on the device. Reading its count would make every decoding step wait for the device. So it is
    None where the cache has no room for more than `limit` tokens, and while tracing.
    """
    past_tokens = token_count(cache)
    if not isinstance(past_tokens, Tensor):
        return past_tokens
    return None if key_count(cache, 0, length) <= limit or is_tracing(past_tokens) else int(past_tokens)
