"""Bidirectional models with `attn_implementation="triton"` in Triton's interpreter, and all of them in bfloat16."""

import copy
from typing import Any

import pytest
import torch
from cases.seq2seq import make_model as make_translator
from cases.seq2seq import random_tokens
from cases.triton_marks import interpreted
from torch import Tensor
from transformers import PreTrainedModel

from dynattn import DCModernBertConfig, DCModernBertForMaskedLM, DCViTConfig, DCViTForImageClassification

STRONG: dict[str, Any] = {"compose_init_scale": 30.0, "initializer_range": 0.2, "compose_static": True}
SHAPE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
ROWS = 61
Inputs = dict[str, Tensor]


def encoder() -> tuple[PreTrainedModel, Inputs]:
    """A window of three tokens to either side, and padding in the second row."""
    config = DCModernBertConfig(**SHAPE, **STRONG, vocab_size=ROWS, local_attention=6, pad_token_id=0)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, 7:] = 0
    ids = torch.randint(1, ROWS, (2, 11))
    return DCModernBertForMaskedLM(config), {"input_ids": ids, "attention_mask": mask}


def vision_transformer() -> tuple[PreTrainedModel, Inputs]:
    config = DCViTConfig(**SHAPE, **STRONG, image_size=[8, 12], patch_size=4, representation_size=8)
    model = DCViTForImageClassification(config)
    torch.nn.init.normal_(model.classifier.weight)
    return model, {"pixel_values": torch.randn(2, 3, 8, 12)}


def translator() -> tuple[PreTrainedModel, Inputs]:
    """More target than source tokens, and padding in the source."""
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, 3:] = 0
    inputs = {"input_ids": random_tokens(2, 5), "attention_mask": mask, "decoder_input_ids": random_tokens(2, 8)}
    return make_translator("dcbart", num_hidden_layers=1, decoder_layers=1), inputs


def relative_translator() -> tuple[PreTrainedModel, Inputs]:
    return make_translator("rcmha"), {"input_ids": random_tokens(2, 5), "decoder_input_ids": random_tokens(2, 8)}


MODELS = {"dcmodernbert": encoder, "dcvit": vision_transformer, "dcbart": translator, "rcmha": relative_translator}


def make(name: str) -> tuple[PreTrainedModel, Inputs]:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    return model.eval(), inputs


def real(logits: Tensor, inputs: Inputs) -> Tensor:
    """Logits of the tokens that are not padding."""
    mask = inputs.get("attention_mask")
    return logits if mask is None or "decoder_input_ids" in inputs else logits[mask.bool()]


def run(model: PreTrainedModel, inputs: Inputs, **options: Any) -> Tensor:
    dtype = next(model.parameters()).dtype
    given = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
    return real(model(**given, **options).logits, inputs)


@interpreted
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:divide by zero encountered in log")
@pytest.mark.parametrize("name", ["dcmodernbert", "dcvit", "dcbart"])
def test_triton_gives_the_logits_and_gradients_of_eager(name: str) -> None:
    pytest.importorskip("triton")
    model, inputs = make(name)
    twins = {"triton": model, "eager": copy.deepcopy(model), "truth": copy.deepcopy(model).double()}
    logits = {}
    for way, twin in twins.items():
        twin.set_attn_implementation("triton" if way == "triton" else "eager")
        logits[way] = run(twin, inputs)
        logits[way].square().sum().backward()
    noise = (logits["eager"] - logits["truth"]).abs().max()
    assert (logits["triton"] - logits["truth"]).abs().max() <= 8 * noise
    gradients = {way: dict(twin.named_parameters()) for way, twin in twins.items()}
    for weight, parameter in gradients["truth"].items():
        exact = parameter.grad
        if exact is None:
            continue
        errors = {way: (gradients[way][weight].grad - exact).abs().max() for way in ("triton", "eager")}
        assert errors["triton"] <= 16 * max(errors["eager"], 1e-6 * exact.abs().max()), weight


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "chunked"])
@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_as_far_from_the_truth_as_rounding_takes_it(name: str, implementation: str) -> None:
    model, inputs = make(name)
    model = model.bfloat16()
    truth = run(copy.deepcopy(model).double(), inputs)
    model.set_attn_implementation("eager")
    noise = (run(model, inputs) - truth).abs().max()
    model.set_attn_implementation(implementation)
    logits = run(model, inputs)
    assert logits.dtype == torch.bfloat16
    assert (logits - truth).abs().max() <= max(2 * noise, 2**-8 * truth.abs().max())


@pytest.mark.parametrize("name", ["rcmha"])
def test_a_model_without_composition_refuses_triton(name: str) -> None:
    model, _ = make(name)
    with pytest.raises(ValueError, match="triton"):
        model.set_attn_implementation("triton")
