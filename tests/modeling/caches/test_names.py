"""A cache is taken under both names that Transformers has had for it, and returned under the installed one's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases.models import make_model
from transformers import DynamicCache, EncoderDecoderCache

from dynattn import (
    DCBartConfig,
    DCBartForConditionalGeneration,
    DCPythiaConfig,
    DCPythiaForCausalLM,
    RCMHAConfig,
    RCMHAForCausalLM,
)
from dynattn.modeling.caches.names import CACHE_NAME, NEW_NAME, OLD_NAME, cache_in

MODELS: dict[str, Callable[[], Any]] = {
    "dcformer": make_model,
    "dcpythia": lambda: DCPythiaForCausalLM(DCPythiaConfig.from_size("tiny", vocab_size=97)),
    "rcmha": lambda: RCMHAForCausalLM(RCMHAConfig.from_size("tiny", vocab_size=97, memory_type="streaming")),
}


@torch.no_grad()
@pytest.mark.parametrize("family", MODELS)
def test_both_names_are_the_same_cache(family: str) -> None:
    torch.manual_seed(0)
    model, ids = MODELS[family]().eval(), torch.randint(1, 97, (2, 9))
    logits = {}
    for name in (OLD_NAME, NEW_NAME):
        cache = DynamicCache(config=model.config)
        first = model(ids[:, :5], use_cache=True, **{name: cache})
        assert cache_in(first) is cache and first[CACHE_NAME] is cache
        logits[name] = model(ids[:, 5:], use_cache=True, **{name: cache}).logits
    assert torch.equal(logits[OLD_NAME], logits[NEW_NAME])
    assert not torch.equal(logits[OLD_NAME], model(ids[:, 5:]).logits)
    with pytest.raises(ValueError, match="cache and past_key_values are two names of the same argument"):
        model(ids, **dict.fromkeys((OLD_NAME, NEW_NAME), DynamicCache()))
    assert torch.equal(model(ids, cache=None).logits, model(ids).logits)


@torch.no_grad()
def test_encoder_decoders_take_both_names() -> None:
    torch.manual_seed(0)
    model, ids = DCBartForConditionalGeneration(DCBartConfig.from_size("tiny")).eval(), torch.randint(3, 50, (2, 6))
    logits = []
    for name in (OLD_NAME, NEW_NAME):
        cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
        for token in ids.split(1, dim=1):
            output = model(ids, decoder_input_ids=token, use_cache=True, **{name: cache})
        assert cache_in(output) is cache
        logits.append(output.logits)
    assert torch.equal(*logits)


def test_a_layer_that_is_checkpointed_writes_into_no_cache() -> None:
    """Transformers takes the cache out of a checkpointed layer's arguments, by the name that it has there."""
    model = make_model().train()
    model.gradient_checkpointing_enable()
    cache, ids = DynamicCache(config=model.config), torch.randint(1, 97, (1, 6))
    model(ids, labels=ids, use_cache=False, past_key_values=cache).loss.backward()
    assert cache.get_seq_length() == 0
