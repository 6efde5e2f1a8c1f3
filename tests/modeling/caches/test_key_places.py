"""How many keys a layer of a cache returns, where new tokens are among them, and how many tokens came before."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, StaticCache
from transformers.cache_utils import Cache

from dynattn.modeling.caches.key_places import first_query_offset, key_count, past_tokens_within, refuse_tokens

WINDOW, ROOM, SLIDING, FULL = 5, 12, 0, 1
CONFIG = LlamaConfig(
    num_hidden_layers=2,
    hidden_size=8,
    num_attention_heads=2,
    sliding_window=WINDOW,
    layer_types=["sliding_attention", "full_attention"],
)


def append(cache: Cache, tokens: int) -> tuple[int, int]:
    """Appends tokens to both layers, and returns how many keys each of them gives back."""
    states = torch.ones(1, 2, tokens, 4)
    sliding, full = (cache.update(states, states, layer)[0].shape[2] for layer in (SLIDING, FULL))
    return sliding, full


def static(tokens: int = 0) -> StaticCache:
    cache = StaticCache(config=CONFIG, max_cache_len=ROOM)
    if tokens:
        append(cache, tokens)
    return cache


@pytest.mark.parametrize("past", [0, 1, WINDOW - 1, WINDOW, WINDOW + 2])
@pytest.mark.parametrize("new", [1, 3, WINDOW])
@pytest.mark.parametrize("make", [static, lambda: DynamicCache(config=CONFIG)], ids=["static", "dynamic"])
def test_a_layer_returns_the_counted_keys_and_the_new_tokens_are_where_the_offset_says(
    make: type[Cache], new: int, past: int
) -> None:
    cache = make()
    if past:
        append(cache, past)
    counted = tuple(key_count(cache, layer, new) for layer in (SLIDING, FULL))
    offsets = [first_query_offset(cache, layer, new) for layer in (SLIDING, FULL)]
    assert append(cache, new) == counted
    for offset, keys in zip(offsets, counted, strict=True):
        seen_by_last = past + new if keys == ROOM or past + new <= WINDOW else keys
        first = keys - new if offset is None else int(offset)  # without an offset the last token is the last key
        assert first + new == seen_by_last


def test_only_unused_places_behind_the_tokens_need_an_offset() -> None:
    assert first_query_offset(None, FULL, 3) is None and key_count(None, FULL, 3) == 3
    assert first_query_offset(DynamicCache(), 0, 3) is None, "it has no layer yet"
    assert first_query_offset(static(WINDOW), SLIDING, 1) is None
    offset = first_query_offset(cache := static(4), FULL, 1)
    append(cache, 1)
    assert offset is not None and offset.shape == () and int(offset) == 4, "a copy, which later tokens leave alone"


def test_a_static_cache_is_asked_for_its_tokens_only_where_they_may_be_too_many() -> None:
    assert past_tokens_within(None, 5, 3) == 0
    states = torch.ones(1, 2, 7, 4)
    for cache, within in ((DynamicCache(), 7), (StaticCache(config=LlamaConfig(), max_cache_len=ROOM), None)):
        cache.update(states, states, 0)
        assert past_tokens_within(cache, 2, ROOM) == within
        assert past_tokens_within(cache, 2, ROOM - 1) == 7


def test_a_layer_with_tokens_is_refused_and_one_that_only_has_room_is_not() -> None:
    refuse_tokens(DynamicCache(config=CONFIG).layers[FULL], "factors")
    prepared = static()
    prepared.early_initialization(batch_size=1, num_heads=2, head_dim=4, dtype=torch.float32, device="cpu")
    refuse_tokens(prepared.layers[FULL], "factors")
    with pytest.raises(ValueError, match="the cache holds 1 tokens without factors; start with an empty cache"):
        refuse_tokens(static(1).layers[FULL], "factors")
