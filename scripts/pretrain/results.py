"""The result of a run, for other programs: `result.json` and the value that `pretrain` returns."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.environment import hardware, provenance, versions
from .model import count_parameters
from .options.model import LOSS_UNITS
from .outputs.metrics import read_metrics
from .trainer import Trainer
from .validation import Validation

# Fields of the training metrics that say how fast the run is.
RATES = ("tokens_per_second", "flops_per_second", "gemm_flops_per_second", "mfu")


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        output, model: the run's folder and the final model in it.
        objective: what was predicted.
        parameters, non_embedding_parameters: the latter without token embeddings and output head.
        steps, tokens: updates made, and tokens that they read, padding included.
        train_loss: nats per target token, from the last line of the training metrics that has a loss, which is a mean
            over the updates since the line before. None if no line has one: all updates were skipped, or the run began
            with the last checkpoint of another run and made none.
        validation_loss, perplexity, bits_per_byte: on all held-out text, after the last update, as in `Validation`.
        validation_targets: the number of targets in the held-out text.
        tokens_per_second: median over the training metrics, all processes together, without validation and saving; None
            if there are none.
        flops_per_second: median rate of the FLOPs that the model needs: composition counts, recomputation does not.
            None for a model that is not of this package.
        gemm_flops_per_second: rate of a large matrix product in the dtype of training, measured on the run's devices.
        mfu: model FLOPs utilization, `flops_per_second / gemm_flops_per_second`.
        train_seconds: time spent on updates.
        wall_seconds: time of the whole call; of a resumed run, only the part after resuming.
        commit, date: as in `provenance`.
    """

    output: Path
    model: Path
    objective: str
    dataset: str
    parameters: int
    non_embedding_parameters: int
    steps: int
    tokens: int
    train_loss: float | None
    validation_loss: float
    perplexity: float
    bits_per_byte: float | None
    validation_targets: int
    tokens_per_second: float | None
    flops_per_second: float | None
    gemm_flops_per_second: float | None
    mfu: float | None
    train_seconds: float
    wall_seconds: float
    processes: int
    hardware: str
    versions: dict[str, str]
    commit: str | None
    date: str

    @property
    def loss_unit(self) -> str:
        """The unit of the losses."""
        return LOSS_UNITS[self.objective]

    def summary(self) -> str:
        """The result for the terminal."""
        speed = "" if self.tokens_per_second is None else f"{self.tokens_per_second:,.0f} tokens/s, "
        return (
            f"validation loss {self.validation_loss:.4f} {self.loss_unit}, perplexity {self.perplexity:.2f}"
            f"{'' if self.bits_per_byte is None else f', {self.bits_per_byte:.4f} bits per byte'} "
            f"after {self.steps} updates\n"
            f"{self.parameters:,} parameters, {speed}{self.train_seconds:.0f} s of training\n"
            f"model, tokenizer and card: {self.model}\n"
            f"metrics: {self.output / 'metrics.jsonl'}"
        )


def summarize(trainer: Trainer, validation: Validation, wall_seconds: float) -> Result:
    """The result of a run whose training has ended."""
    run, accelerator, progress = trainer.run, trainer.accelerator, trainer.progress
    parameters = count_parameters(trainer.module)
    lines = read_metrics(run.metrics, "train")
    losses = [line["loss"] for line in lines if line["loss"] is not None]
    measured = {rate: [line[rate] for line in lines if rate in line] for rate in RATES}
    rates: dict[str, Any] = {rate: statistics.median(found) if found else None for rate, found in measured.items()}
    return Result(
        output=run.path,
        model=run.model,
        objective=trainer.arguments.objective,
        dataset=trainer.plan.source.name,
        parameters=parameters.total,
        non_embedding_parameters=parameters.non_embedding,
        steps=progress.step,
        tokens=progress.tokens,
        train_seconds=progress.seconds,
        wall_seconds=wall_seconds,
        processes=accelerator.num_processes,
        hardware=hardware(accelerator.device, accelerator.num_processes),
        versions=versions(),
        train_loss=losses[-1] if losses else None,
        validation_loss=validation.loss,
        perplexity=validation.perplexity,
        bits_per_byte=validation.bits_per_byte,
        validation_targets=validation.targets,
        **provenance(),
        **rates,
    )
