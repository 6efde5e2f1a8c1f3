"""Hooks on named modules see a layer's maps, and what they change changes the logits as the algebra says."""

import pytest
import torch
from cases.models import make_model
from cases.versions import needs_transformers
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import dynattn
from dynattn.modeling.ops.dcmha.eager import AttentionMaps, compose

IDS = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(7))


def hooked_model() -> dynattn.DCFormerForCausalLM:
    model = make_model().double()
    dynattn.add_map_hooks(model)
    return model


@torch.no_grad()
def logits_with(model: nn.Module, changes: dict[str, object]) -> Tensor:
    """Logits `[B, T, V]` with forward hooks on modules, by their full names."""
    handles = [
        model.get_submodule(name).register_forward_hook(lambda module, inputs, output, change=change: change(output))
        for name, change in changes.items()
    ]
    logits = model(IDS).logits
    for handle in handles:
        handle.remove()
    return logits


def test_hooks_change_no_logits_and_no_names_of_weights() -> None:
    plain, hooked = make_model().double(), hooked_model()
    assert plain.state_dict().keys() == hooked.state_dict().keys()
    torch.testing.assert_close(logits_with(hooked, {}), logits_with(plain, {}), rtol=0, atol=1e-12)
    dynattn.remove_map_hooks(hooked)
    assert torch.equal(logits_with(hooked, {}), logits_with(plain, {}))
    assert [name for name, _ in hooked.named_modules()] == [name for name, _ in plain.named_modules()]
    dynattn.remove_map_hooks(hooked)


@pytest.mark.parametrize("name", AttentionMaps._fields)
def test_each_place_sees_the_maps_of_its_layer(name: str) -> None:
    model, seen = hooked_model(), {}
    logits_with(model, {f"model.layers.1.self_attn.map_hooks.{name}": lambda maps: seen.setdefault(name, maps)})
    assert seen[name].shape == (2, 6, 20, 20)
    if name == "composed_probs":
        maps = make_model().double()(IDS, output_attentions=True).attentions[1]
        torch.testing.assert_close(seen[name], maps)


@pytest.mark.parametrize(("before", "after"), [("scores", "composed_scores"), ("probs", "composed_probs")])
def test_a_patch_before_a_stage_is_the_composed_patch_after_it(before: str, after: str) -> None:
    """Composing is linear in the maps: adding to a head before it adds the composed change behind it."""
    model = hooked_model()
    layer = model.model.layers[1].self_attn
    stages = {}

    def remember(module: nn.Module, inputs: tuple[Tensor, ...], factors: dict[str, Tensor]) -> None:
        pre, post = layer.composition.assemble(factors)
        stages.update(scores=pre, probs=post)

    handle = layer.composition.register_forward_hook(remember)
    logits_with(model, {})
    handle.remove()
    change = torch.zeros(2, 6, 20, 20, dtype=torch.float64)
    change[:, 2] = torch.randn(20, 20, dtype=torch.float64).tril() / 10
    prefix = "model.layers.1.self_attn.map_hooks"
    patched = logits_with(model, {f"{prefix}.{before}": lambda maps: maps + change})
    composed = compose(change, stages[before])
    expected = logits_with(model, {f"{prefix}.{after}": lambda maps: maps + composed})
    assert (patched - logits_with(model, {})).abs().max() > 1e-3
    torch.testing.assert_close(patched, expected, rtol=0, atol=1e-10)


def test_a_head_without_probabilities_is_a_head_whose_output_is_not_projected() -> None:
    model = hooked_model()

    def silence(maps: Tensor) -> Tensor:
        return maps.index_fill(1, torch.tensor([2]), 0.0)

    patched = logits_with(model, {"model.layers.0.self_attn.map_hooks.composed_probs": silence})
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight[:, 16:24] = 0.0
    torch.testing.assert_close(patched, logits_with(model, {}), rtol=0, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("name", ["chunked", "eager"])
def test_hooks_stay_when_the_implementation_changes(name: str) -> None:
    model, seen = hooked_model(), []
    model.model.layers[1].self_attn.map_hooks.probs.register_forward_hook(lambda *given: seen.append(given))
    model.set_attn_implementation(name)
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    logits = model(IDS, attention_mask=mask).logits
    assert len(seen) == 1
    torch.testing.assert_close(logits, make_model().double()(IDS, attention_mask=mask).logits, rtol=0, atol=1e-12)
    dynattn.remove_map_hooks(model)
    assert model.config._attn_implementation == name


@torch.no_grad()
def test_hooks_on_the_encoder_alone_leave_the_decoder_as_it_is() -> None:
    config = dynattn.DCBartConfig.from_size("tiny")
    model = dynattn.DCBartForConditionalGeneration(config).double().eval()
    expected = model(input_ids=IDS, decoder_input_ids=IDS).logits
    dynattn.add_map_hooks(model.get_encoder())
    seen: list[object] = []
    model.get_encoder().layers[0].self_attn.map_hooks.probs.register_forward_hook(lambda *given: seen.append(given))
    logits = model(input_ids=IDS, decoder_input_ids=IDS).logits
    assert len(seen) == 1
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)


@needs_transformers("5.23")
def test_hooks_see_what_continuous_batching_computes() -> None:
    model, seen = make_model(), set()
    dynattn.add_map_hooks(model)
    model.model.layers[1].self_attn.map_hooks.probs.register_forward_hook(lambda *given: seen.add(given[2].shape[2:]))
    settings = ContinuousBatchingConfig(page_size=8, num_blocks=16, max_batch_tokens=16)
    model.generate_batch([[5, 6, 7]], GenerationConfig(max_new_tokens=3, eos_token_id=-1), settings)
    assert {tuple(shape) for shape in seen} == {(3, 3), (1, 4), (1, 5)}


def test_models_without_composed_attention_and_second_hooks_are_refused() -> None:
    model = hooked_model()
    with pytest.raises(ValueError, match="has map hooks already; remove_map_hooks"):
        dynattn.add_map_hooks(model)
    other = dynattn.RCMHAForCausalLM(dynattn.RCMHAConfig(vocab_size=9, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(ValueError, match="RCMHAForCausalLM has no composed attention layers"):
        dynattn.add_map_hooks(other)


@torch.no_grad()
def test_heads_composed_in_place_are_refused_with_the_way_to_their_maps() -> None:
    sizes = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).eval()
    dynattn.compose_heads_of(model)
    with pytest.raises(ValueError, match="LlamaForCausalLM were composed in place, and have no map hooks"):
        dynattn.add_map_hooks(model)
    model.set_attn_implementation("eager")
    assert model(IDS, output_attentions=True).attentions[0].shape == (2, 4, 20, 20)


def test_an_interpretability_tool_traces_and_patches_by_name() -> None:
    nnsight = pytest.importorskip("nnsight")
    model = make_model()
    dynattn.add_map_hooks(model)
    traced = nnsight.NNsight(model)
    with traced.trace(IDS):
        probs = traced.model.layers[0].self_attn.map_hooks.composed_probs.output.save()
    torch.testing.assert_close(probs, model(IDS, output_attentions=True).attentions[0])


@torch.no_grad()
def test_a_model_with_hooks_returns_the_maps_that_the_hooks_made() -> None:
    model = hooked_model()
    for layer in model.model.layers:
        layer.self_attn.map_hooks.composed_probs.register_forward_hook(lambda module, inputs, maps: maps * 0)
    output = model(IDS, output_attentions=True)
    assert torch.equal(output.logits, model(IDS).logits)
    assert not any(maps.any() for maps in output.attentions)
