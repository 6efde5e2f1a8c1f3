"""The settings of a run, which are its arguments after they have been checked and converted."""

from dataclasses import dataclass

import torch

from ...common.errors import UserError
from ..arguments import QUICK_ROUNDS, ROUNDS, BenchmarkArguments, split_at_commas
from .shapes import Shape, parse_shape

# The least duration of one sample: a shorter one would measure the resolution of the clock.
SAMPLE_SECONDS, QUICK_SAMPLE_SECONDS = 0.05, 0.01


@dataclass(frozen=True)
class BenchmarkSettings:
    """What the subjects read.

    Attributes:
        window: keys that a query sees, itself included; None for all.
        layer_types: letters to repeat over the layers of a model, L with the window and G without.
        sample_seconds: the least duration of one sample.
        shapes: shapes asked for; each subject has its own if there are none.
        budget: seconds that a candidate's first call may take, and that its samples may take in all.
        end: time on the monotonic clock after which no further case begins.
    """

    dtype: torch.dtype
    device: torch.device
    window: int | None
    batch_size: int
    seed: int
    rounds: int
    sample_seconds: float
    quick: bool
    shapes: tuple[Shape, ...]
    budget: float | None
    layers: int
    vocabulary: int
    layer_types: str
    end: float | None = None


def read_settings(arguments: BenchmarkArguments) -> BenchmarkSettings:
    """Converts the arguments.

    Raises:
        UserError: the device does not exist or cannot be measured.
    """
    quick = arguments.quick
    return BenchmarkSettings(
        dtype=getattr(torch, arguments.dtype),
        device=_device(arguments.device_name),
        window=arguments.window,
        batch_size=arguments.batch_size,
        seed=arguments.seed,
        rounds=arguments.rounds or (QUICK_ROUNDS if quick else ROUNDS),
        sample_seconds=QUICK_SAMPLE_SECONDS if quick else SAMPLE_SECONDS,
        quick=quick,
        shapes=tuple(parse_shape(text) for text in split_at_commas(arguments.shapes or [])),
        budget=arguments.budget,
        layers=arguments.layers,
        vocabulary=arguments.vocabulary,
        layer_types=arguments.layer_types,
    )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")  # refused below, as every name that stands for no CPU and no GPU
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {name!r} cannot be measured; choose cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name!r} is not there ({torch.cuda.device_count()} CUDA devices found); use cpu")
    return device
