"""What a run ends with, for other programs: `result.json` and the value that `pretrain` returns."""

import dataclasses
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .arguments import PretrainArguments
from .model import ParameterCounts
from .outputs.metrics import Record, read_metrics
from .validation import Validation

# What training lines of the metrics say of speed.
RATES = ("tokens_per_second", "flops_per_second", "gemm_flops_per_second", "mfu")


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        output, model: the run's folder and the final model in it.
        parameters, non_embedding_parameters: the latter without token embeddings and output head.
        steps, tokens: updates made, and tokens that they read.
        train_loss: nats per token, the mean since the line before the last of the training metrics.
        validation_loss, perplexity, bits_per_byte: on all held-out text, after the last update.
        tokens_per_second: median over the training metrics, all processes together, without validation and saving.
        flops_per_second: FLOPs that the model needs, composition included and recomputation not, the same way; None of
            a model that is not of this package.
        gemm_flops_per_second: of a large matrix product in the dtype of training, measured on the run's devices.
        mfu: model FLOPs utilization, the former over the latter.
        train_seconds: time spent on updates; wall_seconds: the whole call, only the part after a resume.
    """

    output: Path
    model: Path
    dataset: str
    parameters: int
    non_embedding_parameters: int
    steps: int
    tokens: int
    train_loss: float
    validation_loss: float
    perplexity: float
    bits_per_byte: float
    tokens_per_second: float
    flops_per_second: float | None
    gemm_flops_per_second: float | None
    mfu: float | None
    train_seconds: float
    wall_seconds: float
    processes: int
    hardware: str
    versions: dict[str, str]

    def write(self, path: Path, arguments: PretrainArguments) -> None:
        """Stores the result together with the run's arguments as JSON."""
        content: dict[str, Any] = dataclasses.asdict(self) | {"arguments": dataclasses.asdict(arguments)}
        path.write_text(json.dumps(content, indent=2, default=str) + "\n")


def measured(metrics: Path, validation: Validation, parameters: ParameterCounts) -> dict[str, Any]:
    """The fields of a `Result` that come from the metrics, the last validation and the model."""
    lines = read_metrics(metrics, "train")
    return {
        "parameters": parameters.total,
        "non_embedding_parameters": parameters.non_embedding,
        "train_loss": lines[-1]["loss"],
        "validation_loss": validation.loss,
        "perplexity": validation.perplexity,
        "bits_per_byte": validation.bits_per_byte,
        **{rate: median_of(rate, lines) for rate in RATES},
    }


def median_of(name: str, lines: list[Record]) -> float | None:
    """Over the lines that have it, or None."""
    values = [line[name] for line in lines if name in line]
    return statistics.median(values) if values else None
