"""Edits in the middle of a cached prompt: recomputation with one layer, golden keys, refusals."""

import copy
from typing import Any

import pytest
import torch
from cases.golden import read_case
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from dynattn import DCFormerConfig, DCFormerForCausalLM, RCMHAConfig, RCMHAForCausalLM, edit_cache, prepack
from dynattn.modeling.caches.names import CACHE_NAME, NEW_NAME
from dynattn.modeling.generation.cache_edit import move_keys
from dynattn.modeling.positions.carope import cached_phases

FIELDS = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "sliding_window": None,
}
FIELDS |= {"initializer_range": 0.2, "compose_init_scale": 3.0, "bos_token_id": None, "eos_token_id": None}
SCHEMES: list[dict[str, Any]] = [
    {"position_scheme": "rope"},
    {"no_rope_layers": [0]},
    {"position_scheme": "none", "compose_key_wise": False},
    {"position_scheme": "alibi"},
    {"position_scheme": "carope", "num_key_value_heads": 2},
    {"position_scheme": "t5", "position_gain": "bucket"},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}},
    {"rope_parameters": {"full_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}},
]


def make(layers: int = 1, **fields: Any) -> DCFormerForCausalLM:
    torch.manual_seed(0)
    return DCFormerForCausalLM(DCFormerConfig(**FIELDS, num_hidden_layers=layers, **fields)).double().eval()


@torch.no_grad()
@pytest.mark.parametrize(
    ("start", "stop", "new"), [(5, 9, 2), (5, 6, 4), (7, 7, 3), (4, 8, 0), (12, 20, 5), (0, 0, 2), (0, 3, 0), (0, 3, 3)]
)
@pytest.mark.parametrize("fields", SCHEMES, ids=lambda fields: str(next(iter(fields.values())))[:20])
def test_with_one_layer_an_edit_is_running_everything_again(
    fields: dict[str, Any], start: int, stop: int, new: int
) -> None:
    model, ids = make(**fields), torch.randint(61, (2, 20))
    inserted, following = torch.randint(61, (2, new)), torch.randint(61, (2, 3))
    cache = DynamicCache()
    model(ids, past_key_values=cache)
    assert edit_cache(model, cache, start, stop, inserted) is cache
    edited = torch.cat([ids[:, :start], inserted, ids[:, stop:]], dim=1)
    assert cache.get_seq_length() == edited.shape[1]
    found = model(following, past_key_values=cache).logits
    expected = model(torch.cat([edited, following], dim=1)).logits[:, -3:]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)  # angles are float32


@torch.no_grad()
def test_with_more_layers_only_what_follows_the_edit_is_approximate() -> None:
    model, ids = make(layers=3), torch.randint(61, (2, 20))
    again, edited = DynamicCache(), DynamicCache()
    model(ids, past_key_values=edited)
    edit_cache(model, edited, 8, 10, new := torch.randint(61, (2, 3)))
    model(torch.cat([ids[:, :8], new, ids[:, 10:]], dim=1), past_key_values=again)
    for layer, other in zip(edited.layers, again.layers, strict=True):
        torch.testing.assert_close(layer.keys[:, :, :11], other.keys[:, :, :11], atol=1e-5, rtol=0)
    assert (edited.layers[2].keys - again.layers[2].keys)[:, :, 11:].abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("rotates", [[1, 0], [0, 1]])
def test_only_layers_that_rotate_move_the_keys_that_follow(rotates: list[int]) -> None:
    model, cache = make(layers=2, no_rope_layers=rotates), DynamicCache()
    model(torch.randint(61, (2, 20)), past_key_values=cache)
    before = [layer.keys[:, :, 12:] for layer in cache.layers]
    edit_cache(model, cache, 8, 12, torch.randint(61, (2, 1)))
    after = [layer.keys[:, :, 9:] for layer in cache.layers]
    assert [not torch.equal(*keys) for keys in zip(before, after, strict=True)] == list(map(bool, rotates))


@torch.no_grad()
@pytest.mark.parametrize("layer", [0, 2])
def test_a_model_that_raises_leaves_the_cache_as_it_was(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache, following = make(layers=3), DynamicCache(), torch.randint(61, (2, 3))
    model(torch.randint(61, (2, 20)), past_key_values=cache)
    before = copy.deepcopy(cache)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model.model.layers[layer].mlp, "forward", interrupt)
    with pytest.raises(KeyboardInterrupt):
        edit_cache(model, cache, 5, 9, torch.randint(61, (2, 2)))
    monkeypatch.undo()
    assert cache.get_seq_length() == 20
    found, expected = (model(following, past_key_values=one).logits for one in (cache, before))
    assert torch.equal(found, expected)


def test_moved_keys_are_those_of_the_golden_case() -> None:
    _, tensors = read_case("positions_pie")
    moved = move_keys(tensors["cached_key"][:, :, 5:], 2, 1e4 ** (-torch.arange(4).double() / 4))
    torch.testing.assert_close(moved, tensors["moved_key"], atol=1e-12, rtol=1e-12)


def test_keys_of_half_precision_are_moved_far_in_single_precision() -> None:
    """In bfloat16 an angle of some thousands would be off by whole turns."""
    key, inv_freq = torch.randn(1, 2, 3, 8), 1e4 ** (-torch.arange(4) / 4)
    exact = move_keys(key.bfloat16().double(), 3001, inv_freq.double())
    moved = move_keys(key.bfloat16(), 3001, inv_freq)
    assert moved.dtype == torch.bfloat16
    torch.testing.assert_close(moved.double(), exact, atol=2**-7, rtol=2**-7)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"position_scheme": "learned"}, "position_scheme 'learned' keeps positions in the cache"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' rotates keys by angles"),
    ({"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 16}}, "rope_type 'longrope' rotates keys"),
]


@pytest.mark.parametrize(("fields", "told"), REFUSED, ids=[told for _, told in REFUSED])
def test_positions_that_cannot_be_moved_are_refused(fields: dict[str, Any], told: str) -> None:
    model, cache = make(**fields), DynamicCache()
    model(torch.zeros(1, 9, dtype=torch.long), past_key_values=cache)
    with pytest.raises(ValueError, match=told):
        edit_cache(model, cache, 2, 3, torch.zeros(1, 1, dtype=torch.long))
    assert cache.get_seq_length() == 9


@pytest.mark.parametrize(
    ("start", "stop", "shape"), [(-1, 3, (1, 1)), (4, 3, (1, 1)), (3, 10, (1, 1)), (2, 3, (2, 1)), (2, 3, (1,))]
)
def test_places_and_rows_have_to_be_in_the_cache(start: int, stop: int, shape: tuple[int, ...]) -> None:
    model, cache = make(), DynamicCache()
    model(torch.zeros(1, 9, dtype=torch.long), past_key_values=cache)
    with pytest.raises(ValueError, match="must be"):
        edit_cache(model, cache, start, stop, torch.zeros(shape, dtype=torch.long))


def test_other_models_are_refused() -> None:
    fields: dict[str, Any] = {name: FIELDS[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
    fields |= {"num_attention_heads": 4, "num_hidden_layers": 1}
    for model in (RCMHAForCausalLM(RCMHAConfig(**fields)), LlamaForCausalLM(LlamaConfig(**fields))):
        with pytest.raises(ValueError, match=f"cache of a {model.config.model_type} cannot be edited"):
            edit_cache(model, DynamicCache(), 0, 0, torch.zeros(1, 1, dtype=torch.long))


@torch.no_grad()
def test_phases_of_half_precision_are_turned_in_single_precision() -> None:
    model, ids = make(position_scheme="carope").bfloat16(), torch.randint(61, (1, 20))
    caches = DynamicCache(), DynamicCache()
    model(ids, past_key_values=caches[0])
    edit_cache(model, caches[0], 5, 9, new := torch.randint(61, (1, 2)))
    model(torch.cat([ids[:, :5], new, ids[:, 9:]], dim=1), past_key_values=caches[1])
    edited, again = (cached_phases(cache.layers[0].keys, 8, torch.float32) for cache in caches)
    torch.testing.assert_close(edited, again, atol=1e-5, rtol=0)


def test_an_empty_cache_is_refused() -> None:
    model = make()
    with pytest.raises(ValueError, match="holds no tokens to edit"):
        edit_cache(model, DynamicCache(config=model.config), 0, 0, torch.zeros(1, 1, dtype=torch.long))


def test_the_cache_of_a_shallower_model_is_refused() -> None:
    model, cache = make(layers=2), DynamicCache()
    make()(torch.zeros(1, 9, dtype=torch.long), past_key_values=cache)
    with pytest.raises(ValueError, match=r"a cache of 1 layers .*cannot be edited"):
        edit_cache(model, cache, 2, 3, torch.zeros(1, 1, dtype=torch.long))


def test_every_layer_has_to_keep_all_tokens() -> None:
    model = make()
    cache = StaticCache(config=model.config, max_cache_len=20)
    model(torch.zeros(1, 9, dtype=torch.long), past_key_values=cache)
    with pytest.raises(ValueError, match=r"ComposedStaticLayer.*cannot be edited"):
        edit_cache(model, cache, 2, 3, torch.zeros(1, 1, dtype=torch.long))


@pytest.mark.skipif(CACHE_NAME == NEW_NAME, reason="this version keeps caches where no gradient is computed")
def test_a_model_that_drops_its_cache_is_refused() -> None:
    model, cache = make(), DynamicCache()
    model(torch.arange(8)[None], past_key_values=cache)
    model.gradient_checkpointing_enable()
    model.train()
    for call in (
        lambda: edit_cache(model, cache, 3, 5, torch.ones(1, 2, dtype=torch.long)),
        lambda: prepack(model, []),
    ):
        with pytest.raises(ValueError, match=r"checkpointing drops caches in training; call model.eval\(\) first"):
            call()
    assert cache.get_seq_length() == 8
