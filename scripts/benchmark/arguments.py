"""What `dynattn benchmark` takes."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from ..common.errors import UserError
from .harness.settings import LAYERS, VOCABULARY, Settings
from .harness.shapes import parse_shape

ROUNDS, QUICK_ROUNDS = 7, 3
# What one sample of a fast call lasts at least: shorter ones would measure the clock.
SAMPLE_SECONDS, QUICK_SAMPLE_SECONDS = 0.05, 0.01


@dataclass
class BenchmarkArguments:
    """From options or a YAML file; lists may be separated by spaces or commas."""

    subjects: list[str] | None = field(
        default=None,
        metadata={
            "help": "What to measure: attention, block, training, prefill, decode, step, relative, long, profile "
            "(all but the last two)."
        },
    )
    shapes: list[str] | None = field(
        default=None,
        metadata={"help": "HEADSxWIDTH@LENGTH, for relative also +MEMORY (each subject's own)."},
    )
    implementations: list[str] | None = field(
        default=None, metadata={"help": "Only these contestants, by the names in the tables (all)."}
    )
    dtype: Literal["float32", "bfloat16", "float16"] = field(default="float32", metadata={"help": "Number format."})
    device: str = field(default="cpu", metadata={"help": "cpu, cuda, cuda:1 ..."})
    threads: int | None = field(default=None, metadata={"help": "Threads of the processor (OMP_NUM_THREADS, else 1)."})
    window: int | None = field(default=None, metadata={"help": "Keys that a query sees, itself included (all)."})
    batch_size: int = field(default=1, metadata={"help": "Sequences at once."})
    layers: int = field(default=LAYERS, metadata={"help": "Depth of the model (training and prefill)."})
    vocabulary: int = field(default=VOCABULARY, metadata={"help": "Its number of tokens."})
    rounds: int | None = field(
        default=None, metadata={"help": f"Rounds over all contestants ({ROUNDS}; quick: {QUICK_ROUNDS})."}
    )
    budget: float | None = field(
        default=None,
        metadata={
            "help": "Seconds: who takes longer for a first call is left out, here and with more tokens; "
            "who took as long in all stops after three rounds."
        },
    )
    preset: Literal["gpu"] | None = field(
        default=None,
        metadata={"help": "gpu: tune the Triton path and make a GPU's whole record within ten minutes."},
    )
    quick: bool = field(default=False, metadata={"help": "Small shapes, few rounds, nothing compiled: a minute."})
    seed: int = field(default=0, metadata={"help": "Seed of inputs and weights."})
    output: str = field(default="runs/benchmark", metadata={"help": "Folder for record.json, table.md and the plots."})
    overwrite: bool = field(default=False, metadata={"help": "Replace the record that is in --output."})
    redraw: str | None = field(
        default=None, metadata={"help": "A record.json: write its table and plots to --output again; measure nothing."}
    )

    def __post_init__(self) -> None:
        for name in ("threads", "window", "batch_size", "layers", "vocabulary", "rounds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, not {value}")
        if self.budget is not None and self.budget <= 0:
            raise UserError(f"budget must be more than 0 seconds, not {self.budget:g}")


def listed(values: list[str]) -> list[str]:
    """Splits at commas what the command line split at spaces."""
    return [name for value in values for name in value.split(",") if name]


def read_settings(arguments: BenchmarkArguments) -> Settings:
    """Checks and converts the arguments.

    Raises:
        UserError: a shape or device that does not exist.
    """
    quick = arguments.quick
    return Settings(
        dtype=getattr(torch, arguments.dtype),
        device=_device(arguments.device),
        window=arguments.window,
        batch_size=arguments.batch_size,
        seed=arguments.seed,
        rounds=arguments.rounds or (QUICK_ROUNDS if quick else ROUNDS),
        sample_seconds=QUICK_SAMPLE_SECONDS if quick else SAMPLE_SECONDS,
        quick=quick,
        shapes=tuple(parse_shape(text) for text in listed(arguments.shapes or [])),
        budget=arguments.budget,
        layers=arguments.layers,
        vocabulary=arguments.vocabulary,
    )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {name!r} cannot be measured; choose cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name!r} is not there ({torch.cuda.device_count()} CUDA devices found); use cpu")
    return device
