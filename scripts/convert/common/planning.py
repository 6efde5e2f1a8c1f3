"""Checks that every conversion makes before a weight is touched."""

from collections.abc import Mapping, Sequence

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ...common.errors import UserError
from .tensor_source import TensorSource, common_dtype
from .weight_map import Step


def choose_dtype(name: str, source: TensorSource, steps: Sequence[Step]) -> torch.dtype:
    """The number format to write: `name`, or for "auto" the one that is read."""
    own = common_dtype({key: source.headers[key] for step in steps for key in step.reads})
    return own if name == "auto" else getattr(torch, name)


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Our model without any numbers in it."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def shapes_of(model: PreTrainedModel) -> dict[str, torch.Size]:
    """The shapes of its weights."""
    return {key: tensor.shape for key, tensor in model.state_dict().items()}


def check_shapes(source: TensorSource, expected: Mapping[str, torch.Size]) -> None:
    """Raises UserError where tensors do not have the shapes that the configuration asks for."""
    for key, shape in expected.items():
        if source.shapes[key] != shape:
            raise UserError(
                f"{key} has shape {tuple(source.shapes[key])}, but config.json asks for {tuple(shape)}; "
                "use the configuration that belongs to the weights"
            )


def in_file_order(steps: Sequence[Step], source: TensorSource) -> list[Step]:
    """The steps in the order of the files that they read first, so that each file is gone through once."""
    return sorted(steps, key=lambda step: source.headers[step.reads[0]].path.name if step.reads else "")
