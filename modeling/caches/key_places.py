"""Where the tokens of a call stand among the keys that a layer of a cache returns."""

from torch import Tensor
from transformers.cache_utils import Cache, StaticLayer


def key_count(cache: Cache | None, layer: int, length: int) -> int:
    """How many keys `length` new tokens get from a layer, places that are preallocated included."""
    return length if cache is None else cache.get_mask_sizes(length, layer)[0]


def first_query_offset(cache: Cache | None, layer: int, length: int) -> Tensor | None:
    """Position of the first of `length` tokens among the keys of a layer, `[]`; None where they end where the keys end.

    It is asked for before the layer gets the tokens.
    """
    static = cache.layers[layer] if cache is not None and layer < len(cache.layers) else None
    if cache is None or not isinstance(static, StaticLayer):
        return None
    keys, first_key = cache.get_mask_sizes(length, layer)
    past_tokens = getattr(static, "cumulative_length_int", None)
    if past_tokens is not None and past_tokens - first_key + length == keys:
        return None
    # A copy, because each layer of the cache adds the tokens to its own count while the model runs.
    return static.cumulative_length.clone()
