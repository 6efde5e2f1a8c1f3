"""DCViT: the same answers in every way of asking, initial weights as the authors draw them, clear errors."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from dynattn import DCViTConfig, DCViTForImageClassification, DCViTModel
from dynattn.modeling.layers.image_embeddings import sincos_positions

IMPLEMENTATIONS = ["eager", "chunked"]
TOKENS: dict[str, dict[str, Any]] = {
    "patches": {},
    "class token": {"use_class_token": True, "classifier_pooling": "cls", "position_embedding_type": "learned"},
    "all tokens": {
        "use_class_token": True,
        "use_distillation_token": True,
        "num_register_tokens": 2,
        "classifier_pooling": "cls_mean",
        "position_embedding_type": "learned",
        "layer_scale_init": 0.5,
        "mlp_type": "swiglu",
    },
}


def make_model(implementation: str = "chunked", **fields: Any) -> DCViTForImageClassification:
    """In float64, with weights that matter everywhere."""
    torch.manual_seed(0)
    strong = {"num_hidden_layers": 2, "num_labels": 3, "compose_init_scale": 30.0, "initializer_range": 0.2}
    config = DCViTConfig.from_size("tiny", **{**strong, **fields}, attn_implementation=implementation)
    return DCViTForImageClassification(config).double().eval()


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("tokens", TOKENS)
@torch.no_grad()
def test_every_way_of_running_gives_the_same_answers(tokens: str) -> None:
    pixels = images(3, 3, 16, 24)
    fields = {"image_size": (16, 24), **TOKENS[tokens]}
    expected = make_model("eager", **fields)(pixels).logits
    model = make_model(**fields)
    torch.testing.assert_close(model(pixels).logits, expected, atol=1e-10, rtol=0)
    alone = torch.cat([model(image[None]).logits for image in pixels])
    torch.testing.assert_close(alone, expected, atol=1e-10, rtol=0)
    single = model.float()(pixels.float()).logits
    torch.testing.assert_close(single.double(), expected, atol=1e-3 * float(expected.abs().max()), rtol=0)


@torch.no_grad()
def test_rows_and_columns_are_not_exchanged() -> None:
    model, pixels = make_model(image_size=(16, 24)), images(1, 3, 16, 24)
    assert (model(pixels).logits - model(pixels.mT).logits).abs().max() > 1e-3


@pytest.mark.parametrize("pooling", ["cls", "mean", "cls_mean"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@torch.no_grad()
def test_a_hidden_token_is_as_if_it_had_other_pixels(implementation: str, pooling: str) -> None:
    model = make_model(implementation, use_class_token=True, classifier_pooling=pooling)
    pixels, mask = images(2, 3, 16, 16), torch.ones(2, 17, dtype=torch.long)
    mask[1, -1] = 0
    changed = pixels.clone()
    changed[1, :, -4:, -4:] = 7.0
    assert (model(pixels).logits - model(changed).logits).abs().max() > 1e-3
    torch.testing.assert_close(
        model(changed, attention_mask=mask).logits, model(pixels, attention_mask=mask).logits, atol=1e-10, rtol=0
    )


def test_recomputed_layers_give_the_same_gradients() -> None:
    pixels, labels = images(2, 3, 16, 16), torch.tensor([0, 2])
    gradients = []
    for recompute in (False, True):
        model = make_model().train()
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(pixels, labels=labels).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-12, rtol=0)


def test_gradients_of_each_example_alone() -> None:
    """By transforms of functions, which cannot read the values of labels to check them."""
    model = make_model()
    pixels = images(2, 3, *model.config.image_shape)
    labels = torch.tensor([0, 2])

    def loss(weights: dict[str, Tensor], pixels: Tensor, labels: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (pixels[None],), {"labels": labels[None]}).loss

    weights = dict(model.named_parameters())
    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, pixels, labels)
    for index in range(2):
        alone = torch.autograd.grad(loss(weights, pixels[index], labels[index]), list(weights.values()))
        torch.testing.assert_close([grads[index] for grads in found.values()], list(alone))


@torch.no_grad()
def test_hidden_states_and_composed_maps_can_be_asked_for() -> None:
    model = make_model()
    outputs = model(images(2, 3, 16, 16), output_hidden_states=True, output_attentions=True)
    assert [tuple(state.shape) for state in outputs.hidden_states] == [(2, 16, 64)] * 3
    assert [tuple(maps.shape) for maps in outputs.attentions] == [(2, 4, 16, 16)] * 2
    assert (outputs.attentions[0].sum(dim=-1) - 1).abs().max() > 1e-3  # composed


def test_stochastic_depth_and_dropout_act_in_training_only() -> None:
    for fields in ({"drop_path_rate": 0.5}, {"hidden_dropout": 0.5}, {"compose_dropout": 0.5}):
        model, pixels = make_model(**fields), images(4, 3, 16, 16)
        assert torch.equal(model(pixels).logits, model(pixels).logits)
        model.train()
        assert not torch.equal(model(pixels).logits, model(pixels).logits)


def test_initial_weights_are_those_of_the_authors() -> None:
    torch.manual_seed(0)
    model = DCViTForImageClassification(DCViTConfig.from_size("s16", num_hidden_layers=1, num_labels=10))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert not weights["classifier.weight"].any() and not weights["classifier.bias"].any()
    limit = (6 / (384 + 1536)) ** 0.5  # Xavier, uniform
    up = weights["model.layers.0.mlp.up_proj.weight"]
    assert 0.99 * limit < up.abs().max() <= limit
    for name, fan_in in (("pre_logits.weight", 384), ("model.embeddings.patch_embeddings.weight", 3 * 16 * 16)):
        assert weights[name].std() == pytest.approx(fan_in**-0.5, rel=0.02)  # LeCun, normal
        assert weights[name].abs().max() <= 2 / 0.8796 * fan_in**-0.5  # and cut off
    assert weights["model.layers.0.self_attn.composition.static_weight"].std() == pytest.approx(0.1 * 6**-0.5, rel=0.3)


def test_tokens_without_positions_differ_from_the_start(tmp_path: Path) -> None:
    """Tokens that start equal and have no positions get equal gradients, and stay equal."""
    fields = {"use_class_token": True, "use_distillation_token": True, "num_register_tokens": 3}
    DCViTModel(DCViTConfig.from_size("tiny", num_hidden_layers=1)).save_pretrained(tmp_path)
    loaded = DCViTForImageClassification.from_pretrained(tmp_path, num_labels=3, **fields)
    new = DCViTForImageClassification(DCViTConfig.from_size("tiny", num_hidden_layers=1, num_labels=3, **fields))
    for model in (new, loaded):
        embeddings = model.model.embeddings
        assert not embeddings.class_token.any()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(images(2, 3, 16, 16).float(), labels=torch.tensor([0, 2])).loss.backward()
        optimizer.step()
        tokens = torch.cat([embeddings.class_token, embeddings.distillation_token, embeddings.register_tokens], dim=1)
        assert tokens[0].unique(dim=0).shape[0] == 5


@pytest.mark.parametrize("tokens", TOKENS)
def test_an_initializer_range_of_zero_makes_zeros(tokens: str) -> None:
    model = make_model(**TOKENS[tokens], initializer_range=0.0)
    assert not any(parameter.any() for parameter in model.model.embeddings.parameters())
    assert not model.classifier.weight.any()


def test_a_classifier_is_added_to_a_model_without_one(tmp_path: Any) -> None:
    model = DCViTModel(DCViTConfig.from_size("tiny", num_hidden_layers=1, use_class_token=True))
    model.save_pretrained(tmp_path)
    classifier = DCViTForImageClassification.from_pretrained(tmp_path, num_labels=7)
    for name, parameter in model.named_parameters():
        assert torch.equal(classifier.model.get_parameter(name), parameter)
    assert classifier.classifier.out_features == 7 and not classifier.classifier.weight.any()


def test_the_caller_decides_before_the_configuration_whether_positions_are_interpolated() -> None:
    fields = {"position_embedding_type": "learned", "interpolate_pos_encoding": True}
    model, pixels = make_model(**fields), images(1, 3, 24, 24)
    assert model(pixels).logits.isfinite().all()
    with pytest.raises(ValueError, match="pass interpolate_pos_encoding=True"):
        model(pixels, interpolate_pos_encoding=False)


@torch.no_grad()
def test_positions_of_half_precision_are_computed_in_single_precision() -> None:
    like = torch.zeros(1, 1, 64)
    assert torch.equal(sincos_positions(30, 40, like.bfloat16()), sincos_positions(30, 40, like).bfloat16())
    embeddings = make_model(position_embedding_type="learned").bfloat16().model.embeddings
    single = copy.deepcopy(embeddings).float()
    found, expected = (one._learned_positions(7, 9, 0, True) for one in (embeddings, single))
    assert torch.equal(found, expected.bfloat16())


def test_dropout_acts_on_embedded_patches() -> None:
    embeddings = make_model(hidden_dropout=0.5).model.embeddings.train()
    tokens = embeddings(images(2, 3, 16, 16))
    assert tokens.eq(0).double().mean().item() == pytest.approx(0.5, abs=0.05)


def test_tensor_parallelism_splits_the_gate_of_an_mlp_that_has_one() -> None:
    """Its activations multiply those of `up_proj`, which are split."""
    for mlp_type, names in {"mlp": {"up", "down"}, "swiglu": {"gate", "up", "down"}}.items():
        plan = DCViTConfig.from_size("tiny", mlp_type=mlp_type).base_model_tp_plan
        assert plan.keys() == {f"layers.*.mlp.{name}_proj" for name in names}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_size": 18}, "image_size (18): its height must be a multiple of patch_size (4)"),
        ({"image_size": (16, 18)}, "its width must be a multiple of patch_size (4)"),
        ({"image_size": [16]}, "image_size ([16]) must be a positive number, or two"),
        ({"patch_size": 0}, "patch_size (0) must be a positive number, or two"),
        ({"hidden_size": 66, "num_attention_heads": 6}, "hidden_size (66) must be a multiple of 4"),
        ({"classifier_pooling": "cls"}, "classifier_pooling ('cls') reads the class token; set use_class_token=True"),
        ({"classifier_pooling": "max"}, "classifier_pooling 'max' does not exist; choose from"),
        ({"mlp_type": "moe"}, "mlp_type 'moe' does not exist; choose from"),
        ({"position_embedding_type": "rope"}, "position_embedding_type 'rope' does not exist; choose from"),
        ({"qk_norm_type": "batch_norm"}, "qk_norm_type 'batch_norm' does not exist; choose from"),
        ({"use_distillation_token": True}, "use_distillation_token=True needs the class token"),
        ({"attention_dropout": 0.1}, "attention_dropout (0.1) must be 0 where heads are composed"),
    ],
    ids=str,
)
def test_configurations_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((StrictDataclassError, ValueError), match=re.escape(message)):
        DCViTConfig.from_size("tiny", **fields)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 16, 16), "[batch, num_channels = 3, height, width], not of shape (2, 16, 16)"),
        ((2, 16, 16, 3), "num_channels = 3"),
        ((2, 3, 0, 16), "images of 0 x 16 pixels are not tiled by patches of 4 x 4"),
        ((2, 3, 18, 16), "images of 18 x 16 pixels are not tiled by patches of 4 x 4"),
        ((2, 3, 16, 18), "images of 16 x 18 pixels are not tiled by patches of 4 x 4"),
        ((2, 3, 24, 24), "the images are 24 x 24 pixels and learned positions are for image_size 16; pass interpolate"),
    ],
)
def test_images_that_do_not_fit_are_refused(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_model(position_embedding_type="learned")(images(*shape))


def test_other_inputs_that_do_not_fit_are_refused() -> None:
    model = make_model()
    with pytest.raises(ValueError, match=r"pixel_values are torch\.uint8; run the image processor first"):
        model(torch.zeros(1, 3, 16, 16, dtype=torch.uint8))
    with pytest.raises(ValueError, match="a DCViT has no mask token"):
        model.model(images(2, 3, 32, 32), bool_masked_pos=torch.ones(2, 16, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"labels of shape \(3,\) do not fit single_label_classification of 2 rows"):
        model(images(2, 3, 16, 16), labels=torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"hides every token of rows \[1\]"):
        model(images(2, 3, 16, 16), attention_mask=torch.tensor([[1] * 16, [0] * 16]))
    with pytest.raises(ValueError, match="cannot compose heads"):
        make_model("sdpa")


@torch.no_grad()
def test_channels_last_is_for_the_convolution_of_patches() -> None:
    model = DCViTForImageClassification(DCViTConfig.from_size("tiny")).eval()
    images = torch.randn(2, model.config.num_channels, model.config.image_size, model.config.image_size)
    before = model(images).logits
    assert model.to(torch.float64, memory_format=torch.channels_last) is model
    convolution = model.model.embeddings.patch_embeddings.weight
    assert convolution.dtype == torch.float64 and convolution.is_contiguous(memory_format=torch.channels_last)
    after = model(images.contiguous(memory_format=torch.channels_last)).logits
    torch.testing.assert_close(after.float(), before, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_registers_come_first_without_a_class_token() -> None:
    model, seen = DCViTModel(DCViTConfig.from_size("tiny", num_register_tokens=2)).eval(), []
    model.embeddings.register_forward_hook(lambda module, given, output: seen.append(output))
    model(torch.randn(1, 3, 16, 16))
    torch.testing.assert_close(seen[0][0, :2], model.embeddings.register_tokens[0])
