"""The generator: sizes, initial weights, every switch, and the start as identity."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases.models import decode, make_model
from torch.distributed.fsdp import fully_shard

from dynattn import DCFormerConfig, DCFormerModel, mixer_fields
from dynattn.modeling.layers.head_composition import DynamicComposition, init_composition

SWITCHES: list[dict[str, Any]] = [
    {"compose_pre": False},
    {"compose_post": False},
    {"compose_query_wise": False},
    {"compose_key_wise": False},
    {"compose_low_rank": False},
    {"compose_gate": False},
    {"compose_static": True},
    {"compose_static": True, "compose_query_wise": False, "compose_key_wise": False},
    {"compose_rank": 1},
    {"compose_rank": 3},
    {"compose_groups": 2},
    {"compose_groups": 3, "compose_static": True},
    {"compose_hidden_size": 5},
    {"compose_act": "gelu_pytorch_tanh"},
]


def switch_name(switches: dict[str, Any]) -> str:
    return "-".join(f"{key.removeprefix('compose_')}={value}" for key, value in switches.items())


@pytest.mark.parametrize(
    ("size", "per_layer"), [("405m", 344_064), ("2.8b", 1_703_936), ("6.9b", 2_686_976)], ids=lambda value: str(value)
)
def test_parameters_added_to_a_layer_are_the_official_ones(size: str, per_layer: int) -> None:
    with torch.device("meta"):
        module = DynamicComposition(DCFormerConfig.from_size(size))
        narrow = DynamicComposition(DCFormerConfig.from_size(size, compose_hidden_size=5))
    assert sum(parameter.numel() for parameter in module.parameters()) == per_layer
    assert narrow.hidden_weight.shape[-1] == narrow.factor_weight.shape[2] == 5


def test_initial_weights_have_the_jax_trainers_spread() -> None:
    module = DynamicComposition(DCFormerConfig.from_size("405m"))
    init_composition(module, scale=1.0)
    hidden, heads, width = 1024, 16, 64
    expected = {
        "hidden_weight": math.sqrt(2 / (hidden + width)),
        "factor_weight": 0.02 / (math.sqrt(width) * (heads + 2)),
        "gate_weight": 0.005 * math.sqrt(2 / (hidden + heads)),
    }
    for name, std in expected.items():
        assert getattr(module, name).std().item() == pytest.approx(std, rel=0.02)
        assert abs(getattr(module, name).mean().item()) < 0.02 * std


def test_the_scale_of_initial_weights_is_not_that_of_the_down_factors() -> None:
    """They stay as they are even at a scale of 0, so that the up factors learn."""
    module = DynamicComposition(DCFormerConfig.from_size("405m", compose_static=True))
    init_composition(module, scale=3.0)
    heads, width, rank = 16, 64, 2
    factors, noise = module.factor_weight, 0.02 / (math.sqrt(width) * (heads + rank))
    expected = (
        (factors[..., :rank, :], noise, 0.02),
        (factors[..., rank:, :], 3 * noise, 0.02),
        (module.gate_weight, 3 * 0.005 * math.sqrt(2 / (1024 + heads)), 0.02),
        (module.static_weight, 3 * 0.1 / math.sqrt(heads), 0.1),  # it has few elements
    )
    for weight, std, error in expected:
        assert weight.std().item() == pytest.approx(std, rel=error)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_the_generator_is_as_wide_as_the_factors_of_a_group(groups: int) -> None:
    config = make_model(compose_groups=groups).config
    module = DynamicComposition(config)
    assert module.hidden_weight.shape == (config.hidden_size, groups, 4, 2 * 2 * 6 // groups)


@pytest.mark.parametrize("kind", ["compose_low_rank", "compose_gate"])
def test_dropout_acts_on_gates_and_on_the_hidden_activations(kind: str) -> None:
    off = {"compose_low_rank": False, "compose_gate": False, kind: True}
    module = DynamicComposition(make_model(**off, compose_dropout=0.5).config)
    init_composition(module, scale=1.0)
    states = torch.randn(2, 50, 48)
    kept, first, second = module.eval()(states), module.train()(states), module(states)
    kept, again, first, second = (torch.stack(one[:4]) for one in (kept, module.eval()(states), first, second))
    assert torch.equal(again, kept)
    assert (first - second).abs().max() > 0
    if kind == "compose_gate":
        dropped = first == 0
        assert dropped.double().mean().item() == pytest.approx(0.5, abs=0.05)
        torch.testing.assert_close(first[~dropped], 2 * kept[~dropped])


@pytest.mark.parametrize("switches", SWITCHES, ids=switch_name)
def test_every_switch_changes_the_model_and_decodes_as_it_prefills(switches: dict[str, Any]) -> None:
    model = make_model(**switches)
    ids = torch.randint(0, 97, (2, 21))
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
        prompt = model(ids[:, :13])
        steps = [prompt.logits, decode(model, ids[:, 13:], prompt.past_key_values)]
        plain = make_model(compose_pre=False, compose_post=False)
        plain.load_state_dict({k: v for k, v in model.state_dict().items() if "composition" not in k})
        assert (plain(ids).logits - full).abs().max() > 0.01 * full.abs().max()
    torch.testing.assert_close(torch.cat(steps, 1), full, atol=1e-4, rtol=0)
    model(ids, labels=ids).loss.backward()
    dead = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert not dead


def test_switching_everything_off_leaves_no_composition() -> None:
    for off in (
        {"compose_pre": False, "compose_post": False},
        {"compose_query_wise": False, "compose_key_wise": False},
        {"compose_low_rank": False, "compose_gate": False},
    ):
        model = make_model(**off)
        assert not model.config.composes
        assert not [name for name, _ in model.named_parameters() if "composition" in name]


def test_scale_zero_starts_as_identity_and_still_learns() -> None:
    model = make_model(compose_init_scale=0, compose_static=True, attn_implementation="eager")
    plain = make_model(compose_pre=False, compose_post=False, attn_implementation="eager")
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "composition" not in k})
    ids = torch.randint(0, 97, (2, 16))
    assert torch.equal(model(ids).logits, plain(ids).logits)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model(ids, labels=ids).loss.backward()
    composition = {name: p for name, p in model.named_parameters() if "composition" in name}
    assert len(composition) == 4 * model.config.num_hidden_layers
    assert all(p.grad.abs().max() > 0 for p in composition.values())


def test_static_mixing_of_groups_is_block_diagonal() -> None:
    config = DCFormerConfig.from_size("tiny", compose_static=True, compose_groups=2)
    module = DynamicComposition(config)
    init_composition(module, scale=1.0)
    pre, _ = module.assemble(module(torch.randn(1, 3, config.hidden_size)))
    assert pre is not None and pre.static is not None
    assert torch.equal(pre.static[:2, 2:], torch.zeros(2, 2))
    assert torch.equal(pre.static[:2, :2], module.static_weight[0, 0])


@pytest.mark.parametrize("mixer", ["dcmha", "talking_heads", "differential"])
def test_autocast_takes_weights_in_the_other_half_precision(mixer: str) -> None:
    model = DCFormerModel(DCFormerConfig.from_size("tiny", vocab_size=20, mixer=mixer)).eval()
    tokens = torch.arange(10)[None]
    expected = model(tokens).last_hidden_state
    with torch.autocast("cpu", torch.bfloat16):
        output = model.half()(tokens).last_hidden_state
    torch.testing.assert_close(output.float(), expected, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("form", [torch.channels_last, torch.channels_last_3d])
def test_memory_formats_of_pictures_leave_the_weights_as_they_are(form: torch.memory_format) -> None:
    generator = DynamicComposition(DCFormerConfig.from_size("tiny", compose_static=True, compose_groups=2))
    init_composition(generator, scale=1.0)
    before = {name: (weight.double(), weight.stride()) for name, weight in generator.named_parameters()}
    torch.nn.Sequential(generator).to(torch.float64, memory_format=form)
    for name, weight in generator.named_parameters():
        assert torch.equal(weight, before[name][0]) and weight.stride() == before[name][1]


def test_errors_of_a_conversion_stay() -> None:
    generator = DynamicComposition(DCFormerConfig.from_size("tiny"))
    with pytest.raises(RuntimeError, match="nowhere"):
        generator._apply(lambda weight: weight.to("nowhere"))


def test_static_matrices_outlive_a_generator_that_is_sharded_for_itself() -> None:
    config = DCFormerConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, **mixer_fields("talking_heads"))
    model = DCFormerModel(config)
    ids = torch.arange(12)[None]
    expected = model(ids).last_hidden_state.detach()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model.layers[0].self_attn.composition)
        found = model(ids).last_hidden_state
        found.sum().backward()
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(found, expected)
