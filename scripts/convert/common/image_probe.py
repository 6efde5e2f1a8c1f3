"""The probe of vision transformers: a batch of two images, each image alone, and both larger than in training."""

from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from .probe import Answers, Probe, by_head, rounding_between


def make_images(_: Path, *configs: Any) -> tuple[Tensor, Tensor]:
    """Random images `[2, C, h, w]` of the configured size, and of one and a half times as many patches each way."""
    config: PreTrainedConfig = configs[0]
    generator = torch.Generator().manual_seed(0)
    image, patch = (_pair(value) for value in (config.image_size, config.patch_size))
    larger = [size * max(1, round(1.5 * pixels / size)) for pixels, size in zip(image, patch, strict=True)]
    same, large = (torch.randn(2, config.num_channels, *shape, generator=generator) for shape in (image, larger))
    return same, large


@torch.no_grad()
def ask(model: PreTrainedModel, images: tuple[Tensor, Tensor]) -> Answers:
    """Runs `model` on images `[2, C, h, w]` of two sizes in the three ways."""
    same, large = images
    together = _answer(model, same)
    alone = torch.cat([_answer(model, same[:1]), _answer(model, same[1:])])
    options = {}
    if "interpolate_pos_encoding" in signature(model.forward).parameters:  # other models always do
        options["interpolate_pos_encoding"] = True
    return Answers(
        "2 images, together, alone and larger",
        (together, alone, _answer(model, large, **options)),
        rounding_between((together, alone)),
    )


def _answer(model: PreTrainedModel, pixels: Tensor, **options: Any) -> Tensor:
    """Logits `[B, num_labels]`, or hidden states `[B, T, E]` of a model without a head."""
    return model(pixels, **options)[0]


def _pair(value: Any) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)


IMAGES = Probe(by_head, make_images, ask)
