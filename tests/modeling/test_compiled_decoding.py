"""Compiled decoding of published mixers and of tables by distance: as exact as decoding without a compiler."""

import copy
from typing import Any

import pytest
import torch
from cases.models import SMALL, assert_within_noise
from torch import Tensor, nn
from transformers import PreTrainedModel, StaticCache

from dynattn import DCFormerConfig, DCFormerForCausalLM, mixer_fields

IDS = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(7))
TABLES = {"position_scheme": "alibi", "position_gain": "distance"}
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: mixer_fields(name) for name in ("talking_heads", "head_convolution", "differential", "modded_nanogpt")},
    "bias and gain": TABLES,
    "composed bias": {**TABLES, "compose_position_bias": True},
}
# In bfloat16 a compiled step calls C code; in float32 it is compiled itself.
CASES = [
    *((variant, torch.float32) for variant in VARIANTS),
    *((variant, torch.bfloat16) for variant in ("differential", "composed bias")),
]


def make(variant: str) -> DCFormerForCausalLM:
    """A model in eval mode whose mixing is far from the identity."""
    torch.manual_seed(1)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "initializer_range": 0.1}
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    model = DCFormerForCausalLM(DCFormerConfig(**{**SMALL, **sizes, **layers, **VARIANTS[variant]})).eval()
    for name, weight in model.named_parameters():
        if any(part in name for part in ("static_weight", "lambda", "factor_weight", "position_gain")):
            nn.init.normal_(weight, std=0.5)
    return model


def read_tokens(model: PreTrainedModel, step: Any) -> Tensor:
    """Logits `[B, T, V]` of `IDS`: a prompt by `model`, the others one by one by `step`."""
    cache = StaticCache(config=model.config, max_cache_len=20)
    logits = [model(IDS[:, :5], past_key_values=cache).logits]
    logits += [step(token, past_key_values=cache).logits for token in IDS[:, 5:].split(1, dim=1)]
    return torch.cat(logits, dim=1)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "dtype"), CASES, ids=str)
@torch.no_grad()
def test_a_compiled_step_is_as_exact_as_one_that_is_not(variant: str, dtype: torch.dtype) -> None:
    torch.compiler.reset()
    model = make(variant).to(dtype)
    exact = copy.deepcopy(model).double()(IDS, use_cache=False).logits
    plain, compiled = (read_tokens(model, step) for step in (model, torch.compile(model, fullgraph=True)))
    assert_within_noise(compiled, plain, exact)
