"""Speculative decoding: drafts and prompt lookup generate the tokens of greedy decoding; cropped caches are right."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases.models import decode, make_model
from cases.versions import crops_static_caches
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel, StaticCache

from dynattn import DCPythiaConfig, DCPythiaForCausalLM, RCMHAConfig, RCMHAForCausalLM

VOCAB = 97
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LARGE = {"initializer_range": 0.3}
FAMILIES = ["dcformer", "dcpythia", "rcmha", "rcmha-all"]


def make(family: str) -> PreTrainedModel:
    """A model whose greedy tokens do not end early."""
    torch.manual_seed(1)
    if family == "dcformer":
        model: PreTrainedModel = make_model()
    elif family == "dcpythia":
        model = DCPythiaForCausalLM(DCPythiaConfig(**SMALL, **LARGE, intermediate_size=48, compose_init_scale=20.0))
    else:
        model = RCMHAForCausalLM(RCMHAConfig(**SMALL, **LARGE, mem_len=None if family == "rcmha-all" else 9))
    return without_end(model)


def without_end(model: PreTrainedModel) -> PreTrainedModel:
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def plain_draft() -> PreTrainedModel:
    torch.manual_seed(2)
    config = LlamaConfig(**SMALL, **LARGE, intermediate_size=48, num_key_value_heads=4)
    return without_end(LlamaForCausalLM(config))


@torch.no_grad()
def close_draft(model: PreTrainedModel) -> PreTrainedModel:
    """A composed model that guesses many tokens right and some wrong, so that both happen."""
    draft = copy.deepcopy(model)
    torch.manual_seed(3)
    for parameter in draft.parameters():
        parameter += 0.06 * parameter.abs().mean() * torch.randn_like(parameter)
    return draft


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ["plain draft", "composed draft", "first layer", "prompt lookup"])
def test_speculation_generates_the_tokens_of_greedy_decoding(family: str, how: str) -> None:
    model = make(family)
    prompt = torch.randint(1, VOCAB, (1, 30))
    prompt = torch.cat([prompt, prompt[:, :10]], dim=1)  # a repetition, for prompt lookup to find
    options: dict = {"prompt_lookup_num_tokens": 4}
    if how == "first layer":
        options = {"assistant_early_exit": 1}
    elif how != "prompt lookup":
        options = {"assistant_model": plain_draft() if how == "plain draft" else close_draft(model)}
    greedy = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 40, "do_sample": False}
    assert torch.equal(model.generate(prompt, **greedy, **options), model.generate(prompt, **greedy))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_that_has_no_layers_yet_takes_tokens_back(family: str) -> None:
    model, prompt = make(family), torch.randint(1, VOCAB, (1, 8)).repeat(1, 3)
    greedy = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 20, "do_sample": False}
    found = model.generate(prompt, **greedy, prompt_lookup_num_tokens=4, past_key_values=DynamicCache())
    assert torch.equal(found, model.generate(prompt, **greedy))


@torch.no_grad()
def test_a_cache_that_holds_a_prefix_is_refused() -> None:
    """Transformers would feed the prompt again, behind the prefix."""
    model, prompt, cache = make("dcformer"), torch.randint(1, VOCAB, (1, 16)), DynamicCache()
    model(prompt[:, :11], past_key_values=cache)
    with pytest.raises(ValueError, match="past_key_values holds 11 tokens, and assisted decoding would append them"):
        model.generate(prompt, past_key_values=cache, prompt_lookup_num_tokens=3, max_new_tokens=3)


@pytest.mark.parametrize("family", ["dcformer", "dcpythia"])
def test_a_composed_draft_saves_passes(family: str) -> None:
    """Else all proposals would be refused, and the tokens would agree although cropped caches were never used."""
    model = make(family)
    draft = close_draft(model)
    prompt = torch.randint(1, VOCAB, (1, 30))
    lengths: list[int] = []

    def note(_: object, __: object, inputs: dict[str, Tensor]) -> None:
        lengths.append(inputs["input_ids"].shape[1])

    model.register_forward_pre_hook(note, with_kwargs=True)
    model.generate(prompt, max_new_tokens=40, do_sample=False, assistant_model=draft)
    assert len(lengths) < 40  # fewer passes than tokens: some proposals were taken
    assert sum(lengths) > prompt.shape[1] + 40  # others were taken back


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_cropped_cache_is_that_of_fewer_tokens(family: str) -> None:
    model = make(family)
    ids = torch.randint(1, VOCAB, (1, 40))

    def filled(count: int) -> DynamicCache:
        cache = DynamicCache(config=model.config)
        model(ids[:, :3], past_key_values=cache)
        for layer in cache.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        model(ids[:, 3:count], past_key_values=cache)
        return cache

    def rest(cache: DynamicCache) -> Tensor:
        return decode(model, ids[:, 25:], cache)

    cropped = filled(31)
    cropped.crop(-6)
    torch.testing.assert_close(rest(cropped), rest(filled(25)))


@torch.no_grad()
def test_convolved_tokens_may_be_taken_back_twice_where_all_are_kept() -> None:
    model, ids = make("rcmha-all"), torch.randint(1, VOCAB, (1, 20))
    cache = DynamicCache(config=model.config)
    model(ids[:, :15], past_key_values=cache)
    cache.crop(-2)
    cache.crop(-3)
    torch.testing.assert_close(decode(model, ids[:, 10:], cache), model(ids).logits[:, 10:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["rcmha", "rcmha-all"])
@torch.no_grad()
def test_a_memory_goes_on_when_transformers_stops_recording(family: str) -> None:
    model, ids = make(family), torch.randint(1, VOCAB, (1, 20))
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        layer.record_past = True
    model(ids[:, :6], past_key_values=cache)
    for layer in cache.layers:
        layer.record_past = False
    torch.testing.assert_close(decode(model, ids[:, 6:], cache), model(ids).logits[:, 6:], atol=1e-4, rtol=0)


@torch.no_grad()
def test_convolved_tokens_of_a_window_are_taken_back_once() -> None:
    """A crop keeps no more of the window than further tokens need."""
    model, ids = make("rcmha"), torch.randint(1, VOCAB, (1, 20))
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        layer.activate_past_recording()
    model(ids, past_key_values=cache)
    cache.crop(-2)
    with pytest.raises(RuntimeError, match="1 convolved tokens cannot be taken back: fewer have been added"):
        cache.crop(-1)


def make_wide(family: str, **more: Any) -> PreTrainedModel:
    """A model whose static cache never drops a token, so that Transformers may take tokens back from 5.24 on."""
    torch.manual_seed(1)
    if family == "rcmha":
        return without_end(RCMHAForCausalLM(RCMHAConfig(**SMALL, **LARGE, mem_len=None, **more)))
    fields = {**SMALL, **LARGE, "intermediate_size": 48, "compose_init_scale": 20.0, "sliding_window": 64}
    return without_end(DCPythiaForCausalLM(DCPythiaConfig(**fields)))


@crops_static_caches
@torch.no_grad()
def test_a_cropped_static_cache_is_that_of_fewer_tokens() -> None:
    model, ids = make_wide("dcpythia"), torch.randint(1, VOCAB, (2, 12))
    cache = StaticCache(config=model.config, max_cache_len=40)
    model(ids[:, :8], past_key_values=cache)
    cache.crop(-3)
    torch.testing.assert_close(decode(model, ids[:, 5:], cache), model(ids).logits[:, 5:], atol=1e-4, rtol=0)


@crops_static_caches
def test_speculation_with_a_static_cache_generates_the_tokens_of_greedy_decoding() -> None:
    model, prompt = make_wide("dcpythia"), torch.randint(1, VOCAB, (1, 12))
    greedy = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 20, "do_sample": False}
    cache = StaticCache(config=model.config, max_cache_len=60)  # with room for the last draft
    drafted = model.generate(prompt, **greedy, past_key_values=cache, assistant_model=close_draft(model))
    assert torch.equal(drafted, model.generate(prompt, **greedy))


@crops_static_caches
@torch.no_grad()
def test_a_static_cache_cannot_take_convolved_tokens_back() -> None:
    model = make_wide("rcmha")
    cache = StaticCache(config=model.config, max_cache_len=40)
    model(torch.randint(1, VOCAB, (1, 8)), past_key_values=cache)
    assert not cache.is_croppable
    with pytest.raises(RuntimeError, match="a static cache cannot take convolved tokens back; use a DynamicCache"):
        cache.crop(-1)


@crops_static_caches
@torch.no_grad()
def test_a_static_cache_takes_tokens_back_that_no_convolution_reads() -> None:
    model, ids = make_wide("rcmha", attention_type="rmha"), torch.randint(1, VOCAB, (2, 12))
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(ids[:, :8], past_key_values=cache)
    assert cache.is_croppable
    cache.crop(-3)
    found = model(ids[:, 5:9], past_key_values=cache).logits
    torch.testing.assert_close(found, model(ids[:, :9]).logits[:, 5:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("make_model_of", [lambda: make("dcformer"), lambda: make("rcmha"), lambda: make_wide("rcmha")])
def test_static_caches_that_cannot_be_cropped_are_refused_by_name(make_model_of: Callable[[], PreTrainedModel]) -> None:
    model = make_model_of()
    prompt = torch.randint(1, VOCAB, (1, 8))
    with pytest.raises(ValueError, match=r"not supported with Static cache|a cache that can be cropped"):
        model.generate(prompt, max_new_tokens=4, prompt_lookup_num_tokens=2, cache_implementation="static")
