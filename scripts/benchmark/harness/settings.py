"""The settings of a benchmark as its subjects read them."""

from dataclasses import dataclass

import torch

from .shapes import Shape

LAYERS, VOCABULARY = 2, 2048


@dataclass(frozen=True)
class Settings:
    """The arguments as the subjects read them."""

    dtype: torch.dtype
    device: torch.device
    window: int | None
    batch_size: int
    seed: int
    rounds: int
    sample_seconds: float
    quick: bool
    shapes: tuple[Shape, ...]
    budget: float | None = None
    layers: int = LAYERS
    vocabulary: int = VOCABULARY
    # When to begin no further case, on the monotonic clock.
    end: float | None = None
