"""`compose_heads_of` on attention of other libraries: Transformers' DETR, and timm's vision transformers."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig, ViTConfig, ViTModel

from dynattn import ComposedMultiheadAttention, compose_heads_of
from dynattn.modeling.layers.head_composition import init_composition
from dynattn.modeling.layers.side_generators import SideGenerators

Ask = Callable[[nn.Module], Tensor]
DETR_NAMES = [
    "model.encoder.layers.0.self_attn",
    "model.decoder.layers.0.self_attn",
    "model.decoder.layers.0.encoder_attn",
]


def detr(**options: Any) -> tuple[nn.Module, Ask]:
    """A small one with a random backbone; the second picture is padded."""
    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    sizes = {"d_model": 16, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 7}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    config = DetrConfig(backbone_config=backbone, num_labels=3, dropout=0.0, **sizes, **layers, **options)
    pixels, mask = torch.randn(2, 3, 32, 32, dtype=torch.float64), torch.ones(2, 32, 32, dtype=torch.long)
    mask[1, :, 20:] = 0
    return DetrForObjectDetection(config).eval().double(), lambda model: model(pixels, pixel_mask=mask).logits


def vision_transformer() -> tuple[nn.Module, Ask]:
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 3}
    model = timm.models.VisionTransformer(**sizes, qk_norm=True).double()
    pixels = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    return model, lambda model: model(pixels)


MODELS = {"detr": (detr, DETR_NAMES), "timm": (vision_transformer, ["blocks.0.attn", "blocks.1.attn"])}


def strengthen(model: nn.Module) -> None:
    """Gives all composition of `model` weights that matter."""
    for module in model.modules():
        if isinstance(module, SideGenerators):
            for generator in module.generators():
                init_composition(generator, scale=40.0)


@pytest.mark.parametrize("kind", MODELS)
def test_outputs_gradients_and_names_do_not_change(kind: str) -> None:
    make, names = MODELS[kind]
    model, ask = make()
    composed = copy.deepcopy(model)
    assert compose_heads_of(composed, compose_static=True) == names
    torch.testing.assert_close(ask(composed), ask(model), atol=1e-12, rtol=1e-12)
    ask(composed).square().sum().backward()
    ask(model).square().sum().backward()
    ours = dict(composed.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(ours[name].grad, parameter.grad, atol=1e-10, rtol=1e-10)
    new = [parameter for name, parameter in ours.items() if "composition" in name]
    assert {(p.dtype, p.requires_grad) for p in new} == {(torch.float64, True)}
    assert {module.training for module in composed.modules()} == {module.training for module in model.modules()}


@pytest.mark.parametrize("kind", MODELS)
def test_all_composition_weights_learn(kind: str) -> None:
    model, ask = MODELS[kind][0]()
    compose_heads_of(model, compose_static=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = ask(model).detach()
    for _ in range(4):  # the values of DETR's first self-attention are zero until their biases have learned
        optimizer.zero_grad()
        ask(model).pow(3).sum().backward()
        optimizer.step()
    composition = {name: p for name, p in model.named_parameters() if "composition" in name}
    assert composition
    assert not [name for name, p in composition.items() if not p.grad.abs().max() > 0]
    assert (ask(model) - before).abs().max() > 1e-4


@pytest.mark.parametrize("kind", MODELS)
def test_a_checkpoint_is_loaded_after_the_same_replacement(kind: str) -> None:
    model, ask = MODELS[kind][0]()
    plain = ask(model)
    compose_heads_of(model, compose_rank=1)
    strengthen(model)
    assert (ask(model) - plain).abs().max() > 1e-3
    other, _ = MODELS[kind][0]()
    compose_heads_of(other, compose_rank=1)
    other.load_state_dict(model.state_dict())
    assert torch.equal(ask(other), ask(model))
    assert torch.equal(ask(copy.deepcopy(model)), ask(model))


def as_multihead(attention: Any, *projections: nn.Linear, cross_attention: bool) -> ComposedMultiheadAttention:
    """PyTorch's module with composed heads and the same weights."""
    across = {"cross_attention": cross_attention, "batch_first": True, "dtype": torch.float64}
    module = ComposedMultiheadAttention(16, 4, compose_static=True, **across)
    state = {f"composition.{name}": weight for name, weight in attention.composition.state_dict().items()}
    if cross_attention:
        keys = attention.key_composition.state_dict()
        state |= {f"key_composition.{name}": weight for name, weight in keys.items()}
    *inputs, output = projections
    state["in_proj_weight"] = torch.cat([projection.weight for projection in inputs])
    state["in_proj_bias"] = torch.cat([projection.bias for projection in inputs])
    state |= {"out_proj.weight": output.weight, "out_proj.bias": output.bias}
    module.load_state_dict(state)
    return module


@pytest.mark.parametrize("name", DETR_NAMES)
def test_attention_of_detr_is_the_module_for_pytorch(name: str) -> None:
    """Positions are added to queries and keys, and factors come from the sums."""
    model, _ = detr()
    compose_heads_of(model, compose_static=True)
    strengthen(model)
    attention, across = model.get_submodule(name), name.endswith("encoder_attn")
    projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    module = as_multihead(attention, *projections, cross_attention=across)
    states, positions = torch.randn(2, 2, 5, 16, dtype=torch.float64).unbind()
    seen, seen_positions = torch.randn(2, 2, 9, 16, dtype=torch.float64).unbind()
    if across:
        ours, _ = attention(states, seen, None, positions, seen_positions)
        expected, _ = module(states + positions, seen + seen_positions, seen, need_weights=False)
    else:
        ours, _ = attention(states, None, positions)
        expected, _ = module(states + positions, states + positions, states, need_weights=False)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_timm_is_the_module_for_pytorch(masked: bool) -> None:
    model, _ = vision_transformer()
    compose_heads_of(model, compose_static=True)
    strengthen(model)
    attention = model.blocks[0].attn
    attention.q_norm = attention.k_norm = nn.Identity()
    parts = [nn.Linear(16, 16).double() for _ in range(3)]
    for part, weight, bias in zip(parts, attention.qkv.weight.chunk(3), attention.qkv.bias.chunk(3), strict=True):
        part.load_state_dict({"weight": weight, "bias": bias})
    module = as_multihead(attention, *parts, attention.proj, cross_attention=False)
    x, visible = torch.randn(2, 9, 16, dtype=torch.float64), torch.rand(9, 9) > 0.3
    expected, _ = module(x, x, x, need_weights=False, attn_mask=~visible if masked else None)
    torch.testing.assert_close(attention(x, visible if masked else None), expected)


def test_names_choose_and_the_rest_keeps_its_implementation() -> None:
    model, ask = detr()
    plain, configs = ask(model), (model.config, model.config.backbone_config)
    before = [config._attn_implementation for config in configs]
    assert compose_heads_of(model, names=DETR_NAMES[2:]) == DETR_NAMES[2:]
    assert not isinstance(model.get_submodule(DETR_NAMES[0]), SideGenerators)
    assert [config._attn_implementation for config in configs] == before
    torch.testing.assert_close(ask(model), plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"implementation": "eager"},
            "implementation='eager' cannot serve this module; use one of ('chunked', 'triton')",
        ),
        ({"compose_rank": 9}, "compose_rank (9) must be from 1 to the heads of a group (4)"),
        ({"bias": True}, "bias"),
    ],
)
def test_options_that_do_not_fit_change_nothing(options: dict[str, Any], message: str) -> None:
    model, _ = detr()
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        compose_heads_of(model, **options)
    assert not [module for module in model.modules() if isinstance(module, SideGenerators)]


def test_dropout_of_probabilities_is_refused_until_it_is_switched_off() -> None:
    model, ask = detr(attention_dropout=0.1)
    with pytest.raises(ValueError, match=r"self_attn: dropout=0\.1 drops probabilities.*use dropout=0\.0"):
        compose_heads_of(model)
    compose_heads_of(model, dropout=0.0)
    model.train()
    assert torch.equal(ask(model), ask(model))


def test_a_model_with_other_attention_is_refused_with_what_is_known() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(
        ValueError, match=r"ViTModel has no torch.nn.MultiheadAttention .* timm.layers.attention.Attention"
    ):
        compose_heads_of(ViTModel(ViTConfig(**sizes, image_size=8, patch_size=4)))
