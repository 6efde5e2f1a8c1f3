"""Caches keep keys, values and key-side factors together, through everything that generation does to a cache."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases.models import decode, make_model
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, CacheLayerMixin

from dynattn import DCFormerForCausalLM, RCMHAConfig, RCMHAForCausalLM
from dynattn.modeling.caches.composed_cache import COMPOSED_LAYERS, ComposedLayerMixin, upgrade_to_composed_cache
from dynattn.modeling.caches.streaming_memory import STREAMING_LAYERS


def random_ids(batch: int, length: int) -> Tensor:
    return torch.randint(0, 97, (batch, length))


@torch.no_grad()
def filled(model: DCFormerForCausalLM, ids: Tensor, cache: Cache | None = None) -> Cache:
    return model(ids, past_key_values=cache, use_cache=True).past_key_values


@pytest.mark.parametrize("rank", [1, 2])
def test_each_layer_keeps_keys_values_and_factors_of_each_token(rank: int) -> None:
    model = make_model(compose_rank=rank)
    cache = filled(model, random_ids(2, 30))
    heads, kv_heads, width = 6, 3, 8
    for layer, layer_type in zip(cache.layers, model.config.layer_types, strict=True):
        tokens = 30 if layer_type == "full_attention" else model.config.sliding_window - 1
        assert layer.keys.shape == layer.values.shape == (2, kv_heads, tokens, width)
        assert layer.factors.keys.shape == (2, 2 * (2 * rank + 1), tokens, heads)  # 10 H at rank 2
        assert layer.factors.values.numel() == 0


@pytest.mark.parametrize(("plain", "ours"), [*COMPOSED_LAYERS.items(), *STREAMING_LAYERS.items()], ids=str)
def test_whatever_changes_the_tokens_of_a_layer_changes_what_we_add(plain: type, ours: type) -> None:
    """A method that a new version of Transformers adds would move keys and leave factors or contexts behind."""
    attention = getattr(ours, "attention", plain)  # layers of hybrid models have methods for other states, too
    only_tell = ("get_", "is_", "lazy_initialization", "max_", "_")
    changing = [name for name in dir(attention) if callable(getattr(plain, name)) and not name.startswith(only_tell)]
    assert "update" in changing
    assert [name for name in changing if getattr(ours, name) is getattr(plain, name)] == []


def test_query_wise_models_use_ordinary_caches() -> None:
    cache = filled(make_model(compose_key_wise=False), random_ids(1, 5))
    assert not any(isinstance(layer, ComposedLayerMixin) for layer in cache.layers)


MAKERS: dict[str, Callable[[Any], Cache]] = {
    "dynamic": lambda config: DynamicCache(config=config),
    "dynamic-without-config": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=48),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("prompt", [1, 7, 20])
def test_any_cache_gives_the_full_forwards_logits(kind: str, prompt: int) -> None:
    model, ids = make_model(), random_ids(2, 33)
    cache = filled(model, ids[:, :prompt], MAKERS[kind](model.config))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, prompt:]
    torch.testing.assert_close(decode(model, ids[:, prompt:], cache), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", MAKERS)
def test_caches_keep_what_autocast_computes_in_its_dtype(kind: str) -> None:
    """Norms and rotations make keys float32, and a static cache has one dtype for keys and values."""
    model, ids = make_model(), random_ids(2, 9)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        cache = filled(model, ids[:, :5], MAKERS[kind](model.config))
        found, expected = decode(model, ids[:, 5:], cache), model(ids, use_cache=False).logits[:, 5:]
    layer: Any = cache.layers[0]
    assert layer.keys.dtype == layer.values.dtype == torch.bfloat16
    assert (found - expected).norm() < 0.1 * expected.norm()


def test_a_prompt_read_in_chunks_has_the_logits_of_one_pass() -> None:
    model, ids = make_model(), random_ids(2, 40)
    cache: Cache | None = None
    logits = []
    with torch.no_grad():
        for chunk in ids.split([1, 12, 3, 17, 7], dim=1):
            output = model(chunk, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits.append(output.logits)
        expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(logits, 1), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_reordered_rows_go_on_as_the_rows_that_they_came_from(kind: str) -> None:
    model, ids, tail = make_model(), random_ids(3, 15), random_ids(3, 4)
    order = torch.tensor([2, 0, 0])
    cache = filled(model, ids, MAKERS[kind](model.config))
    cache.reorder_cache(order)
    expected = decode(model, tail, filled(model, ids[order]))
    torch.testing.assert_close(decode(model, tail, cache), expected, atol=1e-4, rtol=0)


def test_repeated_and_selected_rows_go_on_as_the_rows_that_they_came_from() -> None:
    model, ids, tail = make_model(), random_ids(2, 15), random_ids(1, 4)
    cache = filled(model, ids)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([2]))
    expected = decode(model, tail, filled(model, ids[1:]))
    torch.testing.assert_close(decode(model, tail, cache), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", [6, 25])
def test_a_cropped_cache_that_recorded_its_past_goes_on_as_a_shorter_one(length: int) -> None:
    model, ids, tail = make_model(), random_ids(2, length), random_ids(2, 4)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    upgrade_to_composed_cache(cache)
    cache.layers[0].crop(-3)  # as where a draft of the first layers leaves the others empty
    filled(model, ids, cache)
    cache.crop(-3)
    expected = decode(model, tail, filled(model, ids[:, :-3]))
    with torch.no_grad():
        output = model(tail, past_key_values=cache).logits
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=0)


def make_mha() -> RCMHAForCausalLM:
    """Without convolutions, whose contexts are checked by themselves."""
    torch.manual_seed(1)
    return RCMHAForCausalLM(RCMHAConfig(vocab_size=97, attention_type="mha", mem_len=8)).eval()


@pytest.mark.parametrize("make", [make_model, make_mha])
@pytest.mark.parametrize("order", ["recorded late", "cropped twice"])
def test_tokens_that_a_window_would_need_and_has_lost_are_not_taken_back(make: Callable[[], Any], order: str) -> None:
    """Transformers would go on with a shorter window."""
    model = make()
    cache = DynamicCache(config=model.config)
    if order == "cropped twice":
        cache.activate_past_recording()
    filled(model, random_ids(2, 20), cache)
    cache.activate_past_recording()
    filled(model, random_ids(2, 3), cache)
    cache.crop(-3)
    with pytest.raises(RuntimeError, match="1 tokens cannot be taken back: the window would lack"):
        cache.crop(-1)


def test_a_static_window_that_has_moved_takes_no_tokens_back() -> None:
    model = make_model()
    cache = filled(model, random_ids(2, 20), StaticCache(config=model.config, max_cache_len=48))
    with pytest.raises(RuntimeError, match="a static cache whose window has moved cannot take tokens back; use a Dyn"):
        cache.crop(-1)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_that_was_reset_is_like_a_new_one(kind: str) -> None:
    model, ids = make_model(), random_ids(2, 20)
    cache = filled(model, random_ids(2, 20), MAKERS[kind](model.config))
    cache.reset()
    fresh = MAKERS[kind](model.config)
    with torch.no_grad():
        expected = model(ids, past_key_values=fresh).logits
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, expected, atol=1e-5, rtol=0)
    tail = random_ids(2, 3)
    torch.testing.assert_close(decode(model, tail, cache), decode(model, tail, fresh))


@pytest.mark.parametrize("name", ["offload", "prefetch"])
def test_keys_and_factors_move_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a single device a move shows only by being asked for."""
    layer, moved = filled(make_model(), random_ids(2, 12)).layers[1], []
    monkeypatch.setattr(CacheLayerMixin, name, lambda one: moved.append(one))
    getattr(layer, name)()
    assert moved == [layer, layer.factors]


def test_an_allocated_static_cache_is_taken_over() -> None:
    model, ids = make_model(), random_ids(2, 20)
    cache = StaticCache(config=model.config, max_cache_len=32)
    cache.early_initialization(batch_size=2, num_heads=3, head_dim=8, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, expected, atol=1e-4, rtol=0)


def test_a_cache_filled_by_another_model_is_refused() -> None:
    cache = filled(make_model(compose_pre=False, compose_post=False), random_ids(1, 5))
    with pytest.raises(ValueError, match="holds 5 tokens without composition factors"):
        make_model()(random_ids(1, 1), past_key_values=cache)
