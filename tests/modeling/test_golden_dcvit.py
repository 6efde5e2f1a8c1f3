"""Results of the official vision transformers: logits and the gradients of all parameters in float64."""

import re
from typing import Any

import pytest
import torch
from cases.golden import assert_gradients, flax_attention, read_case, tensors_under
from torch import Tensor, nn

from dynattn import DCViTConfig, DCViTForImageClassification
from dynattn.modeling.layers import image_embeddings

TOKENS = {"cls": "class_token", "pos_embedding": "position_embeddings"}
MODULES = {
    "embedding": "model.embeddings.patch_embeddings",
    "Transformer.encoder_norm": "model.norm",
    "pre_logits": "pre_logits",
    "head": "classifier",
    "LayerNorm_0": "input_layernorm",
    "LayerNorm_1": "post_attention_layernorm",
    "MlpBlock_0.Dense_0": "mlp.up_proj",
    "MlpBlock_0.Dense_1": "mlp.down_proj",
}
POSITIONS = {"sincos2d": "sincos2d", "learn": "learned"}
POOLING = {"gap": "mean", "tok": "cls"}
KINDS = {"kernel": "weight", "scale": "weight", "bias": "bias"}
ATTENTION = "MultiHeadDotProductAttention_0."


def our_weights(official: dict[str, Tensor]) -> dict[str, Tensor]:
    """A whole official model (flax: `[in, out]`, kernels `[h, w, in, out]`) under our names."""
    ours: dict[str, Tensor] = {}
    attention: dict[str, dict[str, Tensor]] = {}
    for key, value in official.items():
        block, rest = re.fullmatch(r"(?:Transformer\.encoderblock_(\d+)\.)?(.*)", key).groups()
        prefix = "" if block is None else f"model.layers.{block}."
        if rest.startswith(ATTENTION):
            attention.setdefault(prefix, {})[rest.removeprefix(ATTENTION)] = value
            continue
        if rest in TOKENS:
            ours[f"model.embeddings.{TOKENS[rest]}"] = value
            continue
        module, kind = rest.rsplit(".", 1)
        ours[f"{prefix}{MODULES[module]}.{KINDS[kind]}"] = value.permute(*reversed(range(value.ndim)))
    conv = "model.embeddings.patch_embeddings.weight"
    ours[conv] = ours[conv].mT  # all dimensions were reversed: [E, C, w, h]
    for prefix, weights in attention.items():
        ours |= {f"{prefix}self_attn.{key}": value for key, value in flax_attention(weights).items()}
    return ours


def build(meta: dict[str, Any], implementation: str) -> DCViTForImageClassification:
    composed = meta["dynamic_compose"]
    config = DCViTConfig(
        image_size=16,
        position_embedding_type=POSITIONS[meta["posemb"]],
        use_class_token=meta["pool_type"] == "tok",
        classifier_pooling=POOLING[meta["pool_type"]],
        patch_size=meta["patch"],
        hidden_size=meta["hidden_size"],
        num_attention_heads=meta["heads"],
        num_hidden_layers=meta["depth"],
        intermediate_size=meta["mlp_dim"],
        representation_size=meta["hidden_size"] if meta["rep_size"] else None,
        num_labels=5,
        use_qk_norm=composed,
        compose_pre=composed,
        compose_post=composed,
        attn_implementation=implementation,
    )
    return DCViTForImageClassification(config).double()


def place_class_token(weights: dict[str, Tensor], first: Tensor | None) -> None:
    """Puts what is about the class token `[1, 1, E]` in front of learned positions `[1, N, E]`, where there are any."""
    name = "model.embeddings.position_embeddings"
    if name in weights:
        weights[name] = torch.cat([first, weights[name]], dim=1)


def use_official_positions(
    model: DCViTForImageClassification, pixels: Tensor, placed: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes sines and cosines from the official tokens `placed` `[B, N, E]`, whose table is in float32."""
    projection = model.model.embeddings.patch_embeddings
    patches = nn.functional.conv2d(pixels, projection.weight, projection.bias, stride=4)
    positions = (placed - patches.flatten(2).mT)[0].detach()
    exact = image_embeddings.sincos_positions(4, 4, positions[None])
    torch.testing.assert_close(positions, exact, atol=8 * torch.finfo(torch.float32).eps, rtol=0)
    monkeypatch.setattr(image_embeddings, "sincos_positions", lambda rows, columns, like: positions)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("dcvit_model_gap_sincos", "eager"),
        ("dcvit_model_gap_sincos", "chunked"),
        ("dcvit_model_tok_learn", "eager"),
        ("dcvit_model_tok_learn", "chunked"),
        ("vit_model_plain", "eager"),
        ("vit_model_plain", "sdpa"),
        ("vit_model_plain", "chunked"),
    ],
)
def test_it_equals_the_official_model(name: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    meta, tensors = read_case(name)
    model = build(meta, implementation)
    weights = our_weights(tensors_under(tensors, "sd."))
    # The authors' class token has no position.
    place_class_token(weights, torch.zeros(1, 1, meta["hidden_size"], dtype=torch.float64))
    model.load_state_dict(weights)
    pixels = tensors["image_nhwc"].permute(0, 3, 1, 2)
    if meta["posemb"] == "sincos2d":
        use_official_positions(model, pixels, tensors["with_posemb"], monkeypatch)

    outputs = model(pixels)
    torch.testing.assert_close(outputs.logits, tensors["out"], atol=1e-9, rtol=0)
    (outputs.logits * tensors["weight_of_output"]).sum().backward()
    expected = our_weights(tensors_under(tensors, "grad.sd."))
    # A position of the class token would get its gradient: the two are added.
    place_class_token(expected, expected.get("model.embeddings.class_token"))
    assert_gradients(model, expected)
