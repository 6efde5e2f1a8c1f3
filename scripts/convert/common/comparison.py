"""Comparing the logits of a converted model with those of its source."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ...common.errors import UserError, last_line
from .tensor_source import TensorSource

# The model may differ from the exact logits by so many times what float32 rounding makes of the formulas themselves.
NOISE_MULTIPLE = 16


AFFORDABLE_OPERATIONS = 2e13


SHORTEST_PROBE, WITHOUT_WINDOW = 16, 64


@dataclass(frozen=True)
class Verification:
    """The largest difference of logits on a probe, and what rounding explains."""

    tokens: int
    difference: float
    noise: float
    limit: float


def compare(observed: Tensor, exact: Tensor, rounded: Tensor) -> Verification:
    """Compares logits `[T, V]` with the exact ones, given what the same formulas give in float32.

    Raises:
        UserError: they differ by more than rounding, or are not finite.
    """
    if not exact.isfinite().all():
        raise UserError("the official weights give logits that are not finite; they are damaged")
    noise = max(largest(rounded - exact), torch.finfo(torch.float32).eps * largest(exact))
    limit = NOISE_MULTIPLE * noise
    difference = largest(observed - exact)
    if not difference <= limit:
        raise UserError(
            f"the converted model's logits differ from the official formulas by {difference:.1e}; rounding explains "
            f"{limit:.1e}. Nothing was written"
        )
    return Verification(len(exact), difference, noise, limit)


def load_model(folder: Path, dtype: torch.dtype, config: PreTrainedConfig | None = None) -> PreTrainedModel:
    """Loads one of our models with weights rounded to `dtype`, to compute in float32.

    Args:
        folder: of the checkpoint.
        dtype: weights are rounded to it.
        config: instead of the one in the folder.

    Raises:
        UserError: it does not load, its weights do not fit its configuration, or memory is short.
    """
    require_memory(folder)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, output_loading_info=True)
        model, info = loaded
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"the converted model does not load: {last_line(error)}") from error
    if wrong := sorted(map(str, (*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]))):
        raise UserError(f"the weights do not fit the converted configuration: {wrong[0]} ({len(wrong)} in all)")
    return model.float().eval()


def require_memory(folder: Path) -> None:
    """Raises UserError where the machine has less memory than the weights in `folder` need in float32."""
    needed = 4 * sum(shape.numel() for shape in TensorSource(folder).shapes.values())
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise UserError(
            f"verifying needs about {needed / 1e9:.0f} GB of memory and the machine has {there / 1e9:.0f} GB; "
            "--no-verify, or use a larger machine"
        )


def largest(values: Tensor) -> float:
    """The largest magnitude; NaN if there is one."""
    return values.abs().max().item()
