"""Implementations of this package as attention functions of models of Transformers."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    LlamaConfig,
    LlamaForCausalLM,
    SplinterConfig,
    SplinterModel,
    StaticCache,
)

from dynattn.modeling.layers.attention_interface import attention_function_of


def test_a_model_may_say_in_the_call_that_it_is_causal() -> None:
    config = CLIPTextConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = CLIPTextModel(config).eval()
    tokens = torch.arange(2, 12)[None]
    expected = model(tokens).last_hidden_state
    model.set_attn_implementation("chunked")
    torch.testing.assert_close(model(tokens).last_hidden_state, expected)


@torch.no_grad()
def test_a_static_cache_of_a_model_of_transformers_is_longer_than_a_prompt() -> None:
    """SDPA needs no mask for the first tokens in it, because it puts the first query at the first key."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=20, initializer_range=0.5)).eval()
    tokens = torch.arange(2, 12)[None]
    expected = model(tokens).logits
    model.set_attn_implementation("chunked")
    found = model(tokens, past_key_values=StaticCache(model.config, max_cache_len=16)).logits
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "term",
    [
        {"softcap": 50.0},
        *({name: torch.zeros(2)} for name in ("s_aux", "position_bias", "indices", "block_indices")),
    ],
)
def test_terms_that_would_be_ignored_are_refused(term: dict[str, Any]) -> None:
    query, key, value = torch.randn(3, 1, 2, 4, 8).unbind()
    attend = attention_function_of("chunked")
    attend(nn.Module(), query, key, value, None, scaling=1.0, softcap=None, is_causal=True)
    with pytest.raises(ValueError, match=rf"would ignore \['{next(iter(term))}'\] of the model; use attn_impl.*eager"):
        attend(nn.Module(), query, key, value, None, scaling=1.0, **term)


@pytest.mark.parametrize("implementation", ["eager", "chunked"])
def test_outputs_can_be_viewed_in_another_shape(implementation: str) -> None:
    """Some models of Transformers, such as AFMoE, merge the heads by `view`, which needs contiguous memory."""
    query, key, value = torch.randn(3, 2, 2, 4, 8).unbind()
    attend = attention_function_of(implementation)
    output, _ = attend(nn.Module(), query, key, value, None, scaling=1.0, is_causal=True)
    assert output.view(2, 4, 16).shape == (2, 4, 16)


def test_a_module_that_does_not_say_whether_it_is_causal_is_refused() -> None:
    """A Splinter is not, and knows only `eager`; a mask says it, too."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = SplinterConfig(**sizes, vocab_size=20, question_token_id=3, attention_probs_dropout_prob=0.0)
    model = SplinterModel(config).eval()
    ids, mask = torch.arange(2, 12)[None], torch.arange(10)[None] < 7
    expected = model(ids, attention_mask=mask).last_hidden_state[:, :7]
    model.set_attn_implementation("chunked")
    with pytest.raises(ValueError, match=r"SplinterSelfAttention does not say whether it is causal.*use attn_impl"):
        model(ids)
    torch.testing.assert_close(model(ids, attention_mask=mask).last_hidden_state[:, :7], expected)
