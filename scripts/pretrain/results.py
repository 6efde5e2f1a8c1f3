"""What a run ends with, for other programs: `result.json` and the value that `pretrain` returns."""

import dataclasses
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .arguments import PretrainArguments
from .metrics import read_metrics
from .model import ParameterCounts
from .validation import Validation


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
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in lines),
    }
