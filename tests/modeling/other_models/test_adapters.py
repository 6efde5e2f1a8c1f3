"""Composed heads in attention of other libraries: Transformers' DETR, and timm's vision transformers."""

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.vision_models import DETR_NAMES, detr, strengthen, vision_transformer
from torch import nn
from transformers import BloomConfig, BloomModel, DetrConfig, DetrForObjectDetection

from dynattn import ComposedMultiheadAttention, compose_heads_of
from dynattn.modeling.other_models.side_generators import SideGenerators


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
        torch.testing.assert_close(attention(states)[0], module(states, states, states, need_weights=False)[0])
    torch.testing.assert_close(ours, expected)


def test_the_decoder_of_detr_may_have_another_number_of_heads() -> None:
    """Its attention has no attribute that tells it, and the configuration names the number of the encoder alone."""
    model, ask = detr(decoder_attention_heads=2)
    before = ask(model)
    compose_heads_of(model)
    assert [model.get_submodule(f"{name}.composition").num_heads for name in DETR_NAMES] == [4, 2, 2]
    torch.testing.assert_close(ask(model), before)


def test_generators_beside_quantized_projections_have_the_dtype_of_the_other_weights() -> None:
    model, _ = detr()
    for name in DETR_NAMES:
        for part in ("q_proj", "k_proj", "v_proj"):
            projection = model.get_submodule(f"{name}.{part}")
            projection.weight = nn.Parameter(projection.weight.char(), requires_grad=False)
    compose_heads_of(model)
    composed = [module for module in model.modules() if isinstance(module, SideGenerators)]
    generators = [generator for module in composed for generator in module.generators()]
    assert {weight.dtype for generator in generators for weight in generator.parameters()} == {torch.float64}


@pytest.mark.parametrize("masking", ["none", "mask", "causal"])
def test_attention_of_timm_is_the_module_for_pytorch(masking: str) -> None:
    """Causality comes before a mask, as in timm."""
    model, _ = vision_transformer()
    attention = model.blocks[0].attn
    del attention.norm, attention.gate  # which older releases do not have
    compose_heads_of(model, compose_static=True)
    strengthen(model)
    attention.q_norm = attention.k_norm = nn.Identity()
    parts = [nn.Linear(16, 16).double() for _ in range(3)]
    for part, weight, bias in zip(parts, attention.qkv.weight.chunk(3), attention.qkv.bias.chunk(3), strict=True):
        part.load_state_dict({"weight": weight, "bias": bias})
    module = as_multihead(attention, *parts, attention.proj, cross_attention=False)
    x, seen, causal = torch.randn(2, 9, 16, dtype=torch.float64), torch.rand(9, 9) > 0.3, torch.ones(9, 9).tril() > 0
    masks = {"none": (None, False, None), "mask": (seen, False, ~seen), "causal": (seen, True, ~causal)}
    *given, hidden = masks[masking]
    expected, _ = module(x, x, x, need_weights=False, attn_mask=hidden)
    torch.testing.assert_close(attention(x, *given), expected)


def test_norm_and_gate_of_timm_stay() -> None:
    timm = pytest.importorskip("timm")
    attention = timm.layers.attention.Attention(16, 4, scale_norm=True, gated=True, norm_layer=nn.LayerNorm)
    model, x = nn.Sequential(attention), torch.randn(2, 9, 16)
    expected = model(x)
    assert compose_heads_of(model) == ["0"]
    torch.testing.assert_close(model(x), expected)


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
        ({"implementation": "sdpa"}, "implementation 'sdpa' cannot compose heads; use 'eager' or 'chunked'"),
        ({"compose_rank": 9}, "compose_rank (9) must be from 1 to the heads of a group (4)"),
        ({"bias": True}, "no options ['bias'] exist here"),
        ({"compose_init_scale": 0.1}, "options ['compose_init_scale'] would change what the modules compute"),
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
    model = BloomModel(BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=9))
    with pytest.raises(ValueError, match=r"BloomModel has no torch.nn.MultiheadAttention .*, and none of timm"):
        compose_heads_of(model)


def test_a_composed_model_can_be_pickled_and_copied() -> None:
    model, ask = detr()
    compose_heads_of(model, compose_static=True)
    strengthen(model)
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert [type(module) for module in again.modules()] == [type(module) for module in model.modules()]
        assert torch.equal(ask(again), ask(model))


@torch.no_grad()
def test_a_memory_format_for_pictures_changes_the_convolutions_alone() -> None:
    model, ask = detr()
    compose_heads_of(model, compose_static=True)
    strengthen(model)
    before = ask(model)
    model.to(memory_format=torch.channels_last)
    composed = [module for module in model.modules() if isinstance(module, SideGenerators)]
    assert all(weight.is_contiguous() for module in composed for weight in module.parameters())
    torch.testing.assert_close(ask(model), before)


def test_a_class_that_composes_when_it_is_made_loads_what_was_saved(tmp_path: Path) -> None:
    class Composed(DetrForObjectDetection):
        def __init__(self, config: DetrConfig) -> None:
            super().__init__(config)
            compose_heads_of(self, compose_static=True)

    model, ask = detr()
    compose_heads_of(model, compose_static=True)
    strengthen(model)
    model.save_pretrained(tmp_path)
    loaded = Composed.from_pretrained(tmp_path, dtype=torch.float64).eval()
    torch.testing.assert_close(ask(loaded), ask(model))
