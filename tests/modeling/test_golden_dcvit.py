"""Results of the official vision transformers: logits and the gradients of all parameters in float64."""

import re
from typing import Any

import pytest
import torch
from cases.golden import flax_attention, read_case, tensors_under
from torch import Tensor, nn

from dynattn import DCViTConfig, DCViTForImageClassification
from dynattn.modeling.layers import image_embeddings

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
        patch_size=meta["patch"],
        hidden_size=meta["hidden_size"],
        num_attention_heads=meta["heads"],
        num_hidden_layers=meta["depth"],
        intermediate_size=meta["mlp_dim"],
        representation_size=meta["hidden_size"],
        num_labels=5,
        use_qk_norm=composed,
        compose_pre=composed,
        compose_post=composed,
        attn_implementation=implementation,
    )
    return DCViTForImageClassification(config).double()


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("dcvit_model_gap_sincos", "eager"),
        ("dcvit_model_gap_sincos", "chunked"),
        ("vit_model_plain", "eager"),
        ("vit_model_plain", "sdpa"),
        ("vit_model_plain", "chunked"),
    ],
)
def test_it_equals_the_official_model(name: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    meta, tensors = read_case(name)
    model = build(meta, implementation)
    model.load_state_dict(our_weights(tensors_under(tensors, "sd.")))
    pixels = tensors["image_nhwc"].permute(0, 3, 1, 2)
    patches = nn.functional.conv2d(
        pixels, model.model.embeddings.patch_embeddings.weight, model.model.embeddings.patch_embeddings.bias, stride=4
    )
    # The official table of positions is in float32.
    positions = (tensors["with_posemb"] - patches.flatten(2).mT)[0].detach()
    exact = image_embeddings.sincos_positions(4, 4, positions[None])
    torch.testing.assert_close(positions, exact, atol=8 * torch.finfo(torch.float32).eps, rtol=0)
    monkeypatch.setattr(image_embeddings, "sincos_positions", lambda rows, columns, like: positions)

    outputs = model(pixels)
    torch.testing.assert_close(outputs.logits, tensors["out"], atol=1e-9, rtol=0)
    (outputs.logits * tensors["weight_of_output"]).sum().backward()
    expected = our_weights(tensors_under(tensors, "grad.sd."))
    assert expected.keys() == dict(model.named_parameters()).keys()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key], atol=1e-8, rtol=0, msg=lambda m, k=key: f"{k}: {m}")
