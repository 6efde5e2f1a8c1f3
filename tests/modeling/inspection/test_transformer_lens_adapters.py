"""TransformerLens: its bridge around a composed decoder computes the same, names the maps, and patches them."""

import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dynattn
from dynattn import DCFormerConfig, DCFormerForCausalLM, DCPythiaConfig, DCPythiaForCausalLM

pytest.importorskip("transformer_lens")
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module

IDS = torch.arange(22).reshape(2, 11) % 50
SHAPE: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 16}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "dcformer": (DCFormerConfig, DCFormerForCausalLM, {}),
    "grouped": (DCFormerConfig, DCFormerForCausalLM, {"num_key_value_heads": 2, "position_scheme": "alibi"}),
    "plain": (DCFormerConfig, DCFormerForCausalLM, {"compose_pre": False, "compose_post": False}),
    "dcpythia": (DCPythiaConfig, DCPythiaForCausalLM, {}),
    "sequential": (DCPythiaConfig, DCPythiaForCausalLM, {"use_parallel_residual": False}),
}


@pytest.fixture(autouse=True)
def entry_points() -> Iterator[None]:
    """Registers the adapters that pyproject.toml names, as TransformerLens does with those of installed packages."""
    known = dict(ArchitectureAdapterFactory._adapters)
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    for architecture, place in project["entry-points"]["transformer_lens.architectures"].items():
        module, _, name = place.partition(":")
        ArchitectureAdapterFactory.register_adapter(architecture, getattr(import_module(module), name))
    yield
    ArchitectureAdapterFactory._adapters = known


def make(family: str) -> Any:
    config_class, model_class, fields = FAMILIES[family]
    torch.manual_seed(0)
    return model_class(config_class.from_size("tiny", **SHAPE, compose_init_scale=20.0, **fields)).double().eval()


def bridge(model: Any) -> TransformerBridge:
    return build_bridge_from_module(model, type(model).__name__, hf_config=model.config)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_bridge_computes_what_the_model_does_and_caches_its_maps(family: str) -> None:
    model = make(family)
    output = model(IDS, output_attentions=True)
    logits, cache = bridge(model).run_with_cache(IDS)
    torch.testing.assert_close(logits, output.logits, atol=1e-12, rtol=0)
    for layer, weights in enumerate(output.attentions):
        torch.testing.assert_close(cache[f"blocks.{layer}.attn.hook_pattern"], weights, atol=1e-12, rtol=0)
    assert cache["blocks.0.attn.hook_attn_scores"].shape == cache["blocks.0.attn.scores.hook_out"].shape
    assert cache["blocks.0.attn.hook_q"].shape == cache["blocks.0.attn.hook_z"].shape == (2, 11, 4, 16)
    assert cache["blocks.0.attn.hook_v"].shape == (2, 11, model.config.num_key_value_heads, 16)
    assert ("blocks.0.hook_resid_mid" in cache) == (family != "dcpythia")


def test_layers_without_norms_of_their_inputs_are_refused() -> None:
    model = DCFormerForCausalLM(DCFormerConfig.from_size("tiny", **SHAPE, norm_placement="output"))
    with pytest.raises(ValueError, match="norm_placement='output' has no norms before attention and MLP"):
        bridge(model)


@torch.no_grad()
def test_patching_probabilities_changes_the_logits_as_the_algebra_says() -> None:
    """Composition is linear in the maps, so that halving those before it halves those after it, and `hook_z`."""
    model = make("dcformer")
    bridged, name = bridge(model), "blocks.1.attn.probs.hook_out"
    _, cache = bridged.run_with_cache(IDS)

    def halve(values: Tensor, hook: Any) -> Tensor:
        return values / 2

    halved = bridged.run_with_hooks(IDS, fwd_hooks=[(name, halve)])
    torch.testing.assert_close(
        halved, bridged.run_with_hooks(IDS, fwd_hooks=[("blocks.1.attn.hook_z", halve)]), atol=1e-12, rtol=0
    )
    assert (halved - bridged(IDS)).abs().max() > 1e-3
    torch.testing.assert_close(
        cache["blocks.1.attn.probs.hook_out"].sum(-1), torch.ones(2, 4, 11).double(), atol=1e-12, rtol=0
    )


@torch.no_grad()
def test_a_bridge_generates_the_tokens_of_the_model() -> None:
    model = make("dcformer").float()
    expected = model.generate(IDS[:1], max_new_tokens=4, do_sample=False, eos_token_id=-1)
    options = {"do_sample": False, "stop_at_eos": False, "return_type": "tokens", "verbose": False}
    assert torch.equal(bridge(model).generate(IDS[:1], max_new_tokens=4, **options), expected)


def test_the_mode_that_folds_norms_is_refused() -> None:
    with pytest.raises((NotImplementedError, RuntimeError, ValueError), match="compatibility"):
        bridge(make("dcformer")).enable_compatibility_mode()


def test_a_model_with_map_hooks_is_bridged_too() -> None:
    model = make("dcpythia")
    dynattn.add_map_hooks(model)
    assert bridge(model)(IDS).shape == (2, 11, 50)
