"""`dynattn convert vit`: a DCViT starts as its parent, learns to compose, and goes back unchanged."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases.checkpoints import assert_same_weights, convert, convert_well, edit_config, refusal, weights_of
from cases.vision_parents import VISION_PARENTS, make_parent
from torch import Tensor
from transformers import AutoImageProcessor, PreTrainedModel, ViTImageProcessor


def save_parent(folder: Path, name: str) -> PreTrainedModel:
    """A parent and its image processor."""
    model = make_parent(name)
    model.save_pretrained(folder)
    ViTImageProcessor(size={"height": 24, "width": 24}).save_pretrained(folder)
    return model


def assert_within_rounding(observed: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(observed, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


def auto_class(name: str) -> Any:
    head = VISION_PARENTS[name][0]
    return transformers.AutoModel if head == "Model" else transformers.AutoModelForImageClassification


@pytest.mark.parametrize("name", VISION_PARENTS)
@torch.no_grad()
def test_the_result_starts_as_its_parent_and_goes_back_bit_for_bit(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = save_parent(tmp_path / "parent", name)
    convert_well("vit", tmp_path / "parent", tmp_path / "ours", "--static", "True")
    assert "2 images, together, alone and larger" in capsys.readouterr().out
    ours = auto_class(name).from_pretrained(tmp_path / "ours").eval()
    assert ours.config.model_type == "dcvit" and ours.config.composes and ours.config.compose_static
    for size, options in ((24, {}), (40, {} if name.startswith("dinov2") else {"interpolate_pos_encoding": True})):
        pixels = torch.randn(3, ours.config.num_channels, size, size)
        assert_within_rounding(ours(pixels, **options)[0], parent(pixels, **options)[0])

    convert_well("vit", tmp_path / "ours", tmp_path / "back", "--reverse")
    assert "not kept" not in capsys.readouterr().err
    written = weights_of(tmp_path / "parent")
    for key, value in written.items():  # what no result needs comes back as zeros
        if key.startswith("pooler.") or key.endswith("mask_token"):
            value.zero_()
    assert_same_weights(written, weights_of(tmp_path / "back"))
    assert (tmp_path / "back/config.json").read_text() == (tmp_path / "parent/config.json").read_text()
    restored = auto_class(name).from_pretrained(tmp_path / "back").eval()
    assert type(restored) is type(parent)
    pixels = torch.randn(1, ours.config.num_channels, 24, 24)
    assert_within_rounding(restored(pixels)[0], parent(pixels)[0])


def test_a_backbone_without_a_pooler_is_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parent: Any = make_parent("vit")
    parent.vit.save_pretrained(tmp_path / "parent")
    convert_well("vit", tmp_path / "parent", tmp_path / "ours")
    assert convert("check", tmp_path / "parent", tmp_path / "ours") == 0
    assert "equal       2 images" in capsys.readouterr().out


def test_images_that_are_not_square(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.ViTConfig(**sizes, image_size=[16, 24], patch_size=8)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "parent")
    convert_well("vit", tmp_path / "parent", tmp_path / "ours")
    assert "2 images, together and alone: logits" in capsys.readouterr().out


@pytest.mark.parametrize(("fields", "message"), [({"image_size": 16}, "24"), ({"num_channels": 1}, "channel")])
def test_models_of_other_images_are_not_compared(
    fields: dict[str, int], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    for name, changed in (("one", {}), ("other", fields)):
        config = transformers.ViTConfig(**{**sizes, "image_size": 24, "patch_size": 8, **changed})
        transformers.ViTModel(config).save_pretrained(tmp_path / name)
    line = refusal(capsys, "check", tmp_path / "one", tmp_path / "other")
    assert re.search(f"other does not read what .*one does: .*{message}", line)


def test_every_term_learns_from_the_identity(tmp_path: Path) -> None:
    save_parent(tmp_path / "parent", "vit")
    convert_well("vit", tmp_path / "parent", tmp_path / "ours", "--static", "True", "--no-verify")
    model = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "ours")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 24, 24), labels=torch.arange(4)).loss.backward()
        optimizer.step()
    composition = {name: p.grad for name, p in model.named_parameters() if ".composition." in name}
    assert composition and all(bool(gradient.abs().max() > 0) for gradient in composition.values())


def test_parent_and_result_can_be_compared_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_parent(tmp_path / "parent", "dinov2")
    convert_well("vit", tmp_path / "parent", tmp_path / "ours", "--no-verify")
    convert_well("vit", tmp_path / "parent", tmp_path / "other", "--init", "paper", "--no-verify")
    capsys.readouterr()
    assert convert("check", tmp_path / "parent", tmp_path / "ours") == 0
    assert "equal       2 images, together, alone and larger" in capsys.readouterr().out
    assert convert("check", tmp_path / "parent", tmp_path / "other") == 1
    assert "on 2 images logits change by up to" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["DeiTForImageClassificationWithTeacher"]},
            "has a head that is not known here; load its weights",
        ),
        ({"architectures": ["DeiTBackbone"]}, "load its weights into DeiTForImageClassification or DeiTModel"),
        ({"model_type": "swin"}, "'swin' model, but only vit, deit, dinov2"),
        ({"image_size": 32}, r"position_embeddings has shape \(1, 11, 32\), but config.json asks for \(1, 18, 32\)"),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_parent(tmp_path / "parent", "deit")
    edit_config(tmp_path / "parent", **changes)
    assert re.search(message, refusal(capsys, "vit", tmp_path / "parent", tmp_path / "ours"))
    assert not (tmp_path / "ours").exists()


def test_options_of_decoders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_parent(tmp_path / "parent", "vit")
    for option in (("--layer-types", "LG"), ("--sliding-window", "5")):
        assert "a dcvit has no windows" in refusal(capsys, "vit", tmp_path / "parent", tmp_path / "ours", *option)


def test_reverse_refuses_what_no_parent_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_parent(tmp_path / "parent", "vit")
    convert_well("vit", tmp_path / "parent", tmp_path / "ours", "--init", "paper", "--no-verify")
    command = ("vit", tmp_path / "ours", tmp_path / "back", "--reverse")
    assert "the model composes heads, which the parent cannot" in refusal(capsys, *command)
    edit_config(tmp_path / "ours", position_embedding_type="sincos2d")
    line = refusal(capsys, *command)
    assert "position_embedding_type is 'sincos2d', but ViT models can only have 'learned'" in line


def test_without_a_class_name_it_is_a_classifier(tmp_path: Path) -> None:
    save_parent(tmp_path / "parent", "vit")
    edit_config(tmp_path / "parent", architectures="ABSENT")
    convert_well("vit", tmp_path / "parent", tmp_path / "ours")
    for number, absent in enumerate(("ABSENT", None, [])):
        edit_config(tmp_path / "ours", architectures=absent)
        convert_well("vit", tmp_path / "ours", tmp_path / str(number), "--reverse")
        assert_same_weights(weights_of(tmp_path / "parent"), weights_of(tmp_path / str(number)))


def test_reverse_refuses_an_unknown_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_parent(tmp_path / "parent", "vit")
    convert_well("vit", tmp_path / "parent", tmp_path / "ours", "--no-verify")
    edit_config(tmp_path / "ours", architectures=["DCViTForMaskedImageModeling"])
    line = refusal(capsys, "vit", tmp_path / "ours", tmp_path / "back", "--reverse")
    assert "DCViTForMaskedImageModeling has a head that is not known here" in line
    assert "load its weights into DCViTForImageClassification or DCViTModel" in line


def test_the_image_processor_goes_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_parent(tmp_path / "parent", "vit")
    convert_well("vit", tmp_path / "parent", tmp_path / "ours", "--no-verify")
    assert AutoImageProcessor.from_pretrained(tmp_path / "ours").size["height"] == 24
    (tmp_path / "parent/preprocessor_config.json").unlink()
    convert_well("vit", tmp_path / "parent", tmp_path / "without", "--no-verify")
    assert "there is no preprocessor_config.json to copy" in capsys.readouterr().err
