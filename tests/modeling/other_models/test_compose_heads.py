"""`compose_heads_of`: the same outputs, the same parameters, gradients for the new ones, and no way around them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases.vision_models import DETR_NAMES, TIMM_NAMES, Ask, detr, strengthen, vision_transformer
from torch import Tensor, nn
from transformers import SiglipVisionConfig, SiglipVisionModel

from dynattn import ComposedMultiheadAttention, compose_heads_of, mixer_fields, with_composed_heads
from dynattn.modeling.other_models.side_generators import SideGenerators

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def transformer(**options: Any) -> tuple[nn.Module, Ask]:
    """PyTorch's encoder-decoder, with padding in the source and a causal target."""
    model = nn.Transformer(16, 4, 2, 2, 32, **{"dropout": 0.0, "batch_first": True, "dtype": torch.float64, **options})
    source, target = torch.randn(2, 9, 16, dtype=torch.float64), torch.randn(2, 6, 16, dtype=torch.float64)
    padding = torch.arange(9) >= torch.tensor([[9], [5]])
    mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)

    def ask(model: nn.Module) -> Tensor:
        """Output `[B, T, E]`."""
        masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
        return model(source, target, tgt_mask=mask, tgt_is_causal=True, **masks)

    return model, ask


def vision_model() -> tuple[nn.Module, Ask]:
    """A vision model of Transformers, whose pooling is an attention with one query."""
    config = SiglipVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, image_size=8, patch_size=4
    )
    pixels = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    return SiglipVisionModel(config).double(), lambda model: model(pixels).pooler_output


class Mixed(nn.Module):
    """Attention with own widths, without bias, one module under two names, and a sub-class."""

    def __init__(self) -> None:
        super().__init__()
        like: dict[str, Any] = {"batch_first": True, "dtype": torch.float64}
        self.cross = nn.MultiheadAttention(16, 4, kdim=10, vdim=12, **like)
        self.layers = nn.ModuleList([nn.MultiheadAttention(16, 4, bias=False, **like)])
        self.again = self.layers[0]
        self.own = type("Own", (nn.MultiheadAttention,), {})(16, 4, **like)

    def forward(self, x: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`[B, T, 16]` of `[B, T, 16]`, `[B, S, 10]` and `[B, S, 12]`."""
        x, _ = self.cross(x, key, value)
        for attention in (self.layers[0], self.again, self.own):
            x = x + attention(x, x, x)[0]
        return x


def mixed() -> tuple[nn.Module, Ask]:
    inputs = [torch.randn(2, length, width, dtype=torch.float64) for length, width in ((5, 16), (8, 10), (8, 12))]
    return Mixed(), lambda model: model(*inputs)


ENCODER_DECODER = [
    *(f"encoder.layers.{layer}.self_attn" for layer in range(2)),
    *(f"decoder.layers.{layer}.{name}" for layer in range(2) for name in ("self_attn", "multihead_attn")),
]
MODELS = {
    "transformer": (transformer, ENCODER_DECODER),
    "vision": (vision_model, ["encoder.layers.0.self_attn", "head.attention"]),
    "mixed": (mixed, ["cross", "layers.0", "again"]),
    "detr": (detr, DETR_NAMES),
    "timm": (vision_transformer, TIMM_NAMES),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_outputs_and_gradients_do_not_change(kind: str, training: bool) -> None:
    make, names = MODELS[kind]
    model, ask = make()
    model.train(training)
    composed = copy.deepcopy(model)
    found = compose_heads_of(composed, compose_static=True)
    assert [name.removeprefix("vision_model.") for name in found] == names
    assert all(isinstance(composed.get_submodule(name), SideGenerators) for name in found)
    assert {module.training for module in composed.modules()} == {training}
    torch.testing.assert_close(ask(composed), ask(model), atol=1e-12, rtol=1e-12)

    ask(composed).square().sum().backward()
    ask(model).square().sum().backward()
    ours = dict(composed.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(ours[name].grad, parameter.grad, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("mixer", ["dcmha", "talking_heads", "head_convolution", "modded_nanogpt"])
@pytest.mark.parametrize("make", [transformer, detr])
def test_the_fields_of_a_mixer_are_options(mixer: str, make: Callable[[], tuple[nn.Module, Ask]]) -> None:
    model, ask = make()
    expected = ask(model)
    for name in compose_heads_of(model, **mixer_fields(mixer)):
        static = model.get_submodule(name).composition.static_weight
        assert (static is not None) == (mixer in ("talking_heads", "head_convolution"))
    torch.testing.assert_close(ask(model), expected, atol=1e-12, rtol=1e-12)


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
    assert (ask(model) - before).abs().max() > 1e-3


def test_parameters_stay_the_same_objects() -> None:
    model, _ = mixed()
    model.cross.requires_grad_(False)
    model.layers[0].out_proj.eval()
    before = {name: (parameter, parameter.requires_grad) for name, parameter in model.named_parameters()}
    compose_heads_of(model)
    after = dict(model.named_parameters())
    for name, (parameter, requires_grad) in before.items():
        assert after[name] is parameter
        assert after[name].requires_grad == requires_grad
    new = [parameter for name, parameter in after.items() if name not in before]
    assert {(p.dtype, p.device.type, p.requires_grad) for p in new} == {(torch.float64, "cpu", True)}
    assert model.again is model.layers[0]
    assert not model.again.out_proj.training
    assert type(model.own).__name__ == "Own"
    assert model.cross.key_composition.hidden_weight.shape[0] == 10
    assert model.layers[0].key_composition is None


def test_projections_of_one_module_stay_tied() -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2, kdim=6, vdim=6))
    model[0].v_proj_weight = model[0].k_proj_weight
    query, source = torch.randn(3, 1, 8), torch.randn(4, 1, 6)
    expected, _ = model[0](query, source, source)
    compose_heads_of(model)
    assert model[0].v_proj_weight is model[0].k_proj_weight
    torch.testing.assert_close(model[0](query, source, source)[0], expected)


@pytest.mark.parametrize("kind", MODELS)
def test_a_checkpoint_is_loaded_after_the_same_replacement(kind: str) -> None:
    (model, ask), (other, _) = (MODELS[kind][0]() for _ in range(2))
    plain = ask(model)
    compose_heads_of(model, compose_rank=1)
    strengthen(model)
    assert (ask(model) - plain).abs().max() > 1e-3
    compose_heads_of(other, compose_rank=1)
    other.load_state_dict(model.state_dict())
    for same in (other, copy.deepcopy(model)):
        assert torch.equal(ask(same), ask(model))


def test_only_the_named_modules_are_replaced() -> None:
    model, _ = transformer()
    chosen = ["decoder.layers.1.multihead_attn"]
    assert compose_heads_of(model, names=chosen, cross_attention=True) == chosen
    composed = [name for name, module in model.named_modules() if isinstance(module, ComposedMultiheadAttention)]
    assert composed == chosen
    assert model.get_submodule(chosen[0]).key_composition is not None
    assert model.encoder.use_nested_tensor
    assert len(compose_heads_of(model)) == 5
    assert not model.encoder.use_nested_tensor


def fail(*_: Any, **__: Any) -> None:
    raise AssertionError("the fused inference path was taken")


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("layers", [[0, 1], [1]], ids=str)
def test_fused_inference_of_encoders_is_switched_off(
    layers: list[int], padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True), 2).eval()
    x = torch.randn(2, 9, 16)
    padding = torch.arange(9) >= torch.tensor([[9], [5]]) if padded else None
    real = torch.ones(2, 9, dtype=torch.bool) if padding is None else ~padding
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padding)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "_transformer_encoder_layer_fwd", fail)
            with pytest.raises(AssertionError, match="fused"):
                encoder(x, src_key_padding_mask=padding)
        compose_heads_of(encoder, names=[f"layers.{layer}.self_attn" for layer in layers])
        found = encoder(x, src_key_padding_mask=padding)
        torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=1e-5)

        strengthen(encoder)
        found = encoder(x, src_key_padding_mask=padding)
        if len(layers) == 2:
            monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", fail)
            assert torch.equal(encoder(x, src_key_padding_mask=padding), found)
    with_gradients = encoder(x, src_key_padding_mask=padding)  # never fused: the parameters need gradients
    torch.testing.assert_close(found[real], with_gradients[real], atol=1e-5, rtol=1e-5)
    assert (found - expected)[real].abs().max() > 0.01


def test_an_encoder_is_built_around_composed_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", fail)
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
    layer.self_attn = ComposedMultiheadAttention(16, 4, batch_first=True, compose_init_scale=40.0)
    with pytest.warns(UserWarning, match="_qkv_same_embed_dim was not True"):
        encoder = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(2, 9, 16), torch.arange(9) >= torch.tensor([[9], [5]])
    with torch.no_grad():
        found = encoder(x, src_key_padding_mask=padding)
    torch.testing.assert_close(found, encoder(x, src_key_padding_mask=padding))


def test_an_encoder_with_composition_off_keeps_its_fused_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True).eval()
    state = layer.self_attn.state_dict()
    x = torch.randn(2, 9, 16)
    with torch.no_grad():
        expected = layer(x)
        layer.self_attn = ComposedMultiheadAttention(16, 4, batch_first=True, compose_pre=False, compose_post=False)
        layer.self_attn.load_state_dict(state)
        assert torch.equal(layer.eval()(x), expected)
        monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", fail)
        with pytest.raises(AssertionError, match="fused"):
            layer(x)


def hooked(model: nn.Module) -> None:
    model.encoder.layers[1].self_attn.register_forward_hook(lambda *_: None)


def patched(model: nn.Module) -> None:
    attention = model.encoder.layers[1].self_attn
    attention.forward = attention.forward


def biased(model: nn.Module) -> None:
    model.encoder.layers[1].self_attn = nn.MultiheadAttention(16, 4, add_bias_kv=True)


def zeroed(model: nn.Module) -> None:
    model.encoder.layers[1].self_attn = nn.MultiheadAttention(16, 4, add_zero_attn=True)


def with_one_head(model: nn.Module) -> None:
    model.encoder.layers[1].self_attn = nn.MultiheadAttention(16, 1)


def dropping(model: nn.Module) -> None:
    model.encoder.layers[1].self_attn.dropout = 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (hooked, r"encoder.layers.1.self_attn has hooks \(_forward_hooks\).*by `names`"),
        (patched, "encoder.layers.1.self_attn has a `forward` of its own"),
        (biased, "encoder.layers.1.self_attn: add_bias_kv=True adds a key that is no token"),
        (zeroed, "encoder.layers.1.self_attn: add_zero_attn=True adds a key that is no token"),
        (with_one_head, "encoder.layers.1.self_attn: .*composing takes at least 2 heads"),
        (dropping, r"encoder.layers.1.self_attn: dropout=0\.1 drops probabilities.*use dropout=0\.0"),
    ],
)
def test_what_cannot_be_replaced_is_refused_and_nothing_is_changed(
    change: Callable[[nn.Module], None], message: str
) -> None:
    model, _ = transformer()
    change(model)
    with pytest.raises(ValueError, match=message):
        compose_heads_of(model)
    assert not any(isinstance(module, ComposedMultiheadAttention) for module in model.modules())
    assert model.encoder.use_nested_tensor
    compose_heads_of(model, names=["encoder.layers.0.self_attn"])


def test_dropout_of_probabilities_is_switched_off_where_asked_for() -> None:
    model, ask = transformer(dropout=0.1)
    expected = ask(model.eval())
    compose_heads_of(model, dropout=0.0)
    torch.testing.assert_close(ask(model), expected, atol=1e-12, rtol=1e-12)
    assert model.encoder.layers[0].dropout.p == 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": ["encoder"]}, r"names has \['encoder'\].*choose from \['encoder.layers.0.self_attn'"),
        ({"names": "encoder"}, r"names is the string 'encoder'; give a list of names, \['encoder'\]"),
        ({"names": 3}, r"names=3 must be a list of strings, such as \['encoder.layers.0.self_attn'\]"),
        ({"names": ["encoder", 3]}, r"names=\['encoder', 3\] must be a list of strings"),
        ({"names": []}, r"names is empty; leave it out for every attention, or choose from \['encoder.layers.0"),
        ({"compose_init_scale": 1.0}, r"options \['compose_init_scale'\] would change what the modules compute"),
        ({"num_key_value_heads": 2}, r"options \['num_key_value_heads'\]"),
        ({"kdim": 2}, r"options \['kdim'\]"),
        ({"differential_heads": True}, r"options \['differential_heads'\] would change what the modules compute"),
        ({"compose_rank": 5}, r"self_attn: compose_rank \(5\)"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compose_heads_of(transformer()[0], **options)


@pytest.mark.parametrize("names", [3, ["encoder", 3], "encoder"])
def test_a_class_is_refused_names_that_are_no_list_of_strings(names: Any) -> None:
    with pytest.raises(ValueError, match=r"names(=3|=\['encoder', 3\]| is the string)"):
        with_composed_heads(SiglipVisionModel, names=names)


def test_a_model_without_such_attention_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear has no torch.nn.MultiheadAttention .* \(q_proj and k_proj, q"):
        compose_heads_of(nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match=r"is a MultiheadAttention itself; give a module that contains it, or make a Composed"
    ):
        compose_heads_of(nn.MultiheadAttention(4, 2))
