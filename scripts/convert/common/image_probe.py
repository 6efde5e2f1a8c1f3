"""The probe of vision transformers: two images together, each alone, and both larger than in training if square."""

from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from .probe import Answers, Probe, by_head, rounding_between


def make_images(_: Path, *configs: Any) -> tuple[Tensor, ...]:
    """Random images `[2, C, h, w]` of the configured size, and of one and a half times as many patches each way.

    The larger ones are left out where height and width differ in patches: Transformers' ViT interpolates its position
    embeddings as if they were those of a square.
    """
    config: PreTrainedConfig = configs[0]
    generator = torch.Generator().manual_seed(0)
    image, patch = (_pair(value) for value in (config.image_size, config.patch_size))
    larger = tuple(size * max(1, round(1.5 * pixels / size)) for pixels, size in zip(image, patch, strict=True))
    rows, columns = (pixels // size for pixels, size in zip(image, patch, strict=True))
    shapes = (image, larger) if rows == columns else (image,)
    return tuple(torch.randn(2, config.num_channels, *shape, generator=generator) for shape in shapes)


@torch.no_grad()
def ask(model: PreTrainedModel, images: tuple[Tensor, ...]) -> Answers:
    """Runs `model` on images `[2, C, h, w]` together and alone, and on larger ones if there are any.

    Answers are logits `[2, num_labels]`, or hidden states `[2, T, E]` of a model without a head.
    """
    same, *larger = images
    together = model(same)[0]
    alone = torch.cat([model(image)[0] for image in same.split(1)])
    options = {}
    if "interpolate_pos_encoding" in signature(model.forward).parameters:  # other models always do
        options["interpolate_pos_encoding"] = True
    return Answers(
        "2 images, together, alone and larger" if larger else "2 images, together and alone",
        (together, alone, *(model(large, **options)[0] for large in larger)),
        rounding_between((together, alone)),
    )


def _pair(value: Any) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)


IMAGES = Probe(by_head, make_images, ask, unread=("pooler.",))
