"""Small DCFormers with composition that matters, for every test of the models."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynattn import DCFormerConfig, DCFormerForCausalLM

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "max_position_embeddings": 512,
    # Large weights: with small ones a model that ignored its composition factors would still look right.
    "initializer_range": 0.2,
    "compose_init_scale": 40.0,
}


@pytest.fixture
def make_model() -> Callable[..., DCFormerForCausalLM]:
    """Returns a maker of a small model in eval mode; keywords override the configuration."""

    def make(**overrides: Any) -> DCFormerForCausalLM:
        torch.manual_seed(1)
        return DCFormerForCausalLM(DCFormerConfig(**{**SMALL, **overrides})).eval()

    return make
