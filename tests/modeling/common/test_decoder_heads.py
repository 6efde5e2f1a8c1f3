"""What heads add to a decoder: continuous batching of a plain one as Transformers has it, classifiers, plain layers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases.models import make_model
from cases.versions import needs_transformers
from torch import nn
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from dynattn import DCFormerConfig, DCFormerForTokenClassification
from dynattn.modeling.common.decoder_heads import is_plain_linear

PROMPTS = [[3, 5, 7, 9, 11], [4, 8, 15, 16, 23, 42, 2, 1], [9]]
# Without a limit the cache takes most of the machine's memory, and every pass reads all of it.
SMALL_CACHE: dict[str, Any] = {"page_size": 8, "num_blocks": 40, "max_batch_tokens": 64}


@needs_transformers("5.23")
@pytest.mark.parametrize("options", [{}, {"attn_implementation": "eager"}, {"attn_implementation": "chunked"}], ids=str)
def test_continuous_batching_of_a_plain_decoder_gives_the_tokens_of_generate(options: dict[str, Any]) -> None:
    model = make_model(compose_pre=False, compose_post=False, **options)
    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs = model.generate_batch(PROMPTS, config, ContinuousBatchingConfig(**SMALL_CACHE))
    alone = [model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :] for prompt in PROMPTS]
    found = sorted(output.generated_tokens for output in outputs.values())
    assert found == sorted(tokens.tolist() for tokens in alone)


@pytest.mark.parametrize(
    ("fields", "share"), [({}, 0.1), ({"classifier_dropout": 0.0}, 0.0), ({"hidden_dropout": 0.3}, 0.3)]
)
def test_classifiers_of_tokens_drop_what_the_configuration_says(fields: dict[str, float], share: float) -> None:
    model = DCFormerForTokenClassification(DCFormerConfig.from_size("tiny", **fields))
    assert model.dropout.p == share
    assert not model.score.bias.any()  # as PyTorch alone would not begin


class QuantizedWeight(nn.Parameter):
    """Stands for weights that are more than numbers."""


@pytest.mark.parametrize(
    "change",
    [
        lambda linear: setattr(linear, "weight", QuantizedWeight(linear.weight)),
        lambda linear: setattr(linear, "forward", linear.forward),
        lambda linear: linear.register_forward_hook(lambda *_: None),
        lambda linear: linear.register_forward_pre_hook(lambda *_: None),
    ],
    ids=["weight", "forward", "hook", "pre-hook"],
)
def test_a_linear_layer_that_does_more_is_not_plain(change: Callable[[nn.Linear], object]) -> None:
    linear = nn.Linear(3, 2)
    assert is_plain_linear(linear)
    change(linear)
    assert not is_plain_linear(linear)
