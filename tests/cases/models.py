"""Small DCFormers whose composition matters, and what several tests do with models."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

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


def make_model(**overrides: Any) -> DCFormerForCausalLM:
    """Returns a small model in eval mode; keywords override the configuration."""
    torch.manual_seed(1)
    return DCFormerForCausalLM(DCFormerConfig(**{**SMALL, **overrides})).eval()


@torch.no_grad()
def decode(model: PreTrainedModel, ids: Tensor, cache: Cache | None = None) -> Tensor:
    """Logits `[B, T, V]` of `ids` `[B, T]`, read one by one after the tokens in `cache`."""
    logits = []
    for token in ids.split(1, dim=1):
        output = model(token, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


def assert_within_noise(logits: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Errs against the logits in float64 by at most 4 times the plain pass, or one rounding of the largest."""
    noise = max((plain - exact).abs().max(), torch.finfo(plain.dtype).eps * exact.abs().max())
    assert (logits - exact).abs().max() <= 4 * noise


def assert_same_gradients(found: list[Tensor], expected: list[Tensor]) -> None:
    """Compares gradients of a compiled model, each by its own size.

    A gradient that would be zero without rounding, such as that of a bias of all keys, is compared with the size of the
    others.
    """
    rounding = 1e-6 * max(float(grad.abs().max()) for grad in expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max()) + rounding, rtol=1e-3)
