"""A DCViT with composition off, or at its identity, is Transformers' ViT, DeiT or DINOv2: answers and gradients."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.checkpoints import weights_of
from cases.vision_parents import SHAPE, VISION_PARENTS, make_parent
from torch import Tensor
from transformers import PreTrainedModel, ViTConfig, ViTForImageClassification

from dynattn import DCViTConfig, DCViTForImageClassification, DCViTModel
from dynattn.scripts.convert.common.weight_map import plan_import
from dynattn.scripts.convert.upcycle.parents.vit import VIT

OFF = {"compose_pre": False, "compose_post": False}
IDENTITY = {"compose_init_scale": 0.0, "compose_static": True}


def our_tensors(
    theirs: PreTrainedModel, tensors: dict[str, Tensor], config: DCViTConfig, folder: Path
) -> dict[str, Any]:
    """Tensors of the parent's parameters under our names, by way of the names in files."""
    holder = copy.deepcopy(theirs)
    holder.load_state_dict(tensors)
    holder.save_pretrained(folder)
    written = weights_of(folder)
    steps, _ = plan_import(VIT.weight_map(config), written)
    return {
        key: tensor
        for step in steps
        for key, tensor in zip(step.writes, step.run([written[name] for name in step.reads]), strict=True)
    }


def make_pair(name: str, implementation: str, folder: Path, **fields: Any) -> tuple[PreTrainedModel, Any]:
    """The parent in float64, and ours with its weights."""
    theirs = make_parent(name).double()
    config = DCViTConfig(**VIT.fields(theirs.config), **fields, attn_implementation=implementation)
    ours: Any = DCViTForImageClassification(config) if VISION_PARENTS[name][0] != "Model" else DCViTModel(config)
    weights = our_tensors(theirs, theirs.state_dict(), config, folder)
    if isinstance(ours, DCViTModel):
        weights = {key.removeprefix("model."): tensor for key, tensor in weights.items()}
    absent, unknown = ours.double().load_state_dict(weights, strict=False)
    assert not unknown and all(".composition." in key for key in absent)
    return theirs, ours.eval()


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "chunked", "identity-eager", "identity-chunked"])
@pytest.mark.parametrize("name", VISION_PARENTS)
def test_answers_and_gradients_are_the_parents(name: str, implementation: str, tmp_path: Path) -> None:
    fields = IDENTITY if implementation.startswith("identity") else OFF
    theirs, ours = make_pair(name, implementation.removeprefix("identity-"), tmp_path / "weights", **fields)
    pixels = torch.randn(2, ours.config.num_channels, 24, 24, dtype=torch.float64)
    expected, observed = theirs(pixels)[0], ours(pixels)[0]
    torch.testing.assert_close(observed, expected, atol=1e-12, rtol=1e-12)

    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    (observed * weight).sum().backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in theirs.named_parameters()}
    grads = our_tensors(theirs, gradients, ours.config, tmp_path / "gradients")
    for key, parameter in ours.named_parameters():
        if ".composition." not in key:
            name_in_file = key if isinstance(ours, DCViTForImageClassification) else f"model.{key}"
            torch.testing.assert_close(
                parameter.grad, grads[name_in_file], atol=1e-10, rtol=1e-10, msg=lambda m, k=key: f"{k}: {m}"
            )


@pytest.mark.parametrize("name", [name for name in VISION_PARENTS if "base" not in name])
@torch.no_grad()
def test_positions_are_interpolated_as_the_parents_do(name: str, tmp_path: Path) -> None:
    theirs, ours = make_pair(name, "eager", tmp_path, **OFF)
    theirs, ours = theirs.float(), ours.float()  # DINOv2 interpolates in float32
    options = {} if name.startswith("dinov2") else {"interpolate_pos_encoding": True}
    for shape in ((40, 40), (16, 48), (72, 16), (40, 8)):
        pixels = torch.randn(2, ours.config.num_channels, *shape)
        expected = theirs(pixels, **options).logits
        torch.testing.assert_close(
            ours(pixels, **options).logits, expected, atol=1e-5 * float(expected.abs().max()), rtol=0
        )


@torch.no_grad()
def test_images_need_not_be_square(tmp_path: Path) -> None:
    shape = {**SHAPE, "image_size": (16, 40)}
    theirs = ViTForImageClassification(ViTConfig(**shape, intermediate_size=48)).double().eval()
    config = DCViTConfig(**VIT.fields(theirs.config), **OFF)
    ours = DCViTForImageClassification(config).double().eval()
    ours.load_state_dict(our_tensors(theirs, theirs.state_dict(), config, tmp_path))
    pixels = torch.randn(2, 3, 16, 40, dtype=torch.float64)
    torch.testing.assert_close(ours(pixels).logits, theirs(pixels).logits, atol=1e-12, rtol=1e-12)
