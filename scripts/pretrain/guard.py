"""Updates that would spoil the weights: what is wrong with one, where it comes from, and the batch, kept for later."""

import logging
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from ..common.atomic_file import write_json
from ..common.errors import UserError
from ..common.segment_memory import CarriedMemory
from .arguments import PretrainArguments
from .engines.interface import Engine
from .outputs import checkpoint
from .outputs.checkpoint import TrainingProgress
from .outputs.run_folder import RunFolder
from .processes import on_all
from .weight_average import WeightAverage

logger = logging.getLogger(__name__)

# Losses by which a spike is judged, and how many of them there must be.
REMEMBERED, ENOUGH = 100, 20
Batch = dict[str, Tensor]


class DivergedError(UserError):
    """The run stopped because its loss or a gradient is not what training makes."""


class RollbackError(Exception):
    """An update was bad, and the run is to go on from its newest checkpoint without the data since then."""


@dataclass(frozen=True)
class BadUpdate:
    """An update that was not made.

    Attributes:
        step: its number, counted from 1.
        reason: what is wrong with it.
        layer: where it shows first.
        documents: that its batch consists of.
        kept: the folder with the batch.
    """

    step: int
    reason: str
    layer: str
    documents: Sequence[str]
    kept: Path

    def describe(self) -> str:
        """Step, reason, layer, batch and documents in one line."""
        shown = ", ".join(self.documents[:3]) + (", ..." if len(self.documents) > 3 else "")
        return f"update {self.step} {self.reason}, first in {self.layer}; its batch ({shown}) is kept in {self.kept}"


class Guard:
    """What a run does about updates that would spoil its weights: it stops, skips them or goes back, as it was told."""

    def __init__(self, engine: Engine, arguments: PretrainArguments, run: RunFolder) -> None:
        self.engine, self.arguments, self.run = engine, arguments, run

    def examine(
        self,
        fault: str,
        model: nn.Module,
        forward: Callable[[Batch], Any],
        batches: Sequence[Batch],
        documents: Sequence[str],
        progress: TrainingProgress,
    ) -> None:
        """Looks for the cause of a `fault`, keeps this process's `batches` of `[B, T]`, and counts the update as bad.

        Args:
            forward: gives a batch to the model.
            documents: that the batches consist of.

        Raises:
            DivergedError: the run is to stop.
            RollbackError: it is to go on from its newest checkpoint.
        """
        accelerator, choice = self.engine.accelerator, self.arguments.on_bad_update
        layer = find_layer(accelerator.unwrap_model(model), forward, batches, self.engine.gradient)
        self.engine.end_scoring(model)
        kept = self.run.incidents / incident_name(progress)
        bad = BadUpdate(progress.step + 1, fault, layer, documents, kept)
        on_all(self.run.path, lambda: keep_batch(bad, batches, accelerator.process_index))
        progress.bad_updates += 1
        if choice == "stop" or progress.bad_updates > self.arguments.max_bad_updates:
            raise DivergedError(
                f"{bad.describe()}; training stopped; {self.last_checkpoint()}; lower learning_rate or max_grad_norm, "
                "or lengthen warmup_steps, in a new run, or give on_bad_update: skip or rollback"
            )
        logger.warning("%s; %s", bad.describe(), choice)
        if choice == "rollback":
            raise RollbackError

    def rolled_back(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        memory: CarriedMemory,
        before: TrainingProgress,
        average: WeightAverage | None,
    ) -> TrainingProgress:
        """Restores the newest checkpoint; its progress leaves out the data up to the bad update.

        Raises:
            UserError: there is no checkpoint.
        """
        saved = checkpoint.list_checkpoints(self.run.checkpoints)
        if not saved:
            raise UserError(f"update {before.step + 1} is bad, and no checkpoint was saved to roll back to")
        progress = checkpoint.load(self.engine, saved[-1], model, optimizer, memory, average)
        progress.skipped = before.data_step + 1 - progress.step
        progress.bad_updates = before.bad_updates
        return progress

    def last_checkpoint(self) -> str:
        """Which checkpoint holds weights from before the fault, in words."""
        saved = checkpoint.list_checkpoints(self.run.checkpoints)
        return f"the last good checkpoint is {saved[-1]}" if saved else "no checkpoint had been saved"


def incident_name(progress: TrainingProgress) -> str:
    """The folder of a bad update; after a rollback the same update reads other data, and each may be bad."""
    data = f"-data-{progress.data_step + 1:06d}" if progress.skipped else ""
    return f"update-{progress.step + 1:06d}{data}"


def find_fault(loss: float, norm: float, recent: Sequence[float], threshold: float | None) -> str | None:
    """What is wrong with an update of this loss and gradient norm, or None.

    Args:
        recent: the losses before it.
        threshold: how many standard deviations above the mean of `recent` a loss is a spike; None for none.
    """
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return f"has loss {loss} and gradient norm {norm}"
    if threshold is None or len(recent) < ENOUGH:
        return None
    mean, deviation = statistics.fmean(recent), statistics.pstdev(recent)
    if loss <= mean + threshold * deviation:
        return None
    return f"has loss {loss:.4g}, more than {threshold:g} standard deviations above {mean:.4g} +- {deviation:.2g}"


def remember(recent: list[float], loss: float) -> None:
    """Adds the loss of an update that was made to those that the next ones are judged by."""
    recent.append(loss)
    del recent[:-REMEMBERED]


def find_layer(
    model: nn.Module,
    forward: Callable[[Batch], Any],
    batches: Sequence[Batch],
    gradient: Callable[[nn.Parameter], Tensor | None] = attrgetter("grad"),
) -> str:
    """The first module whose output is not finite, else the weight whose gradient is not, else the one of largest norm.

    All processes have to call this together. Each looks at all of its batches, for where weights are shared out, a
    forward pass takes all processes; they agree on what the first of them has found.

    Args:
        forward: gives a batch to the model.
        gradient: the gradient of a weight.
    """
    found = gather_object([name for batch in batches if (name := _first_not_finite(model, forward, batch))])
    if found:
        return f"the output of {found[0]}"
    gradients = ((name, gradient(weight)) for name, weight in model.named_parameters())
    values = {name: float(_whole(tensor.float().norm())) for name, tensor in gradients if tensor is not None}
    not_finite = [name for name, norm in values.items() if not math.isfinite(norm)]
    if not_finite:
        # A backward pass begins with the last layer.
        return f"the gradient of {not_finite[-1]}"
    return f"the gradient of {max(values, key=values.__getitem__)}, the largest" if values else "the loss"


def keep_batch(bad: BadUpdate, batches: Sequence[Batch], process: int) -> None:
    """Stores this process's batches `[B, T]`, and what is known of the update, for whoever wants to look into it."""
    bad.kept.mkdir(parents=True, exist_ok=True)
    # Entries may share memory, which the format refuses.
    tensors = {
        f"{index}.{name}": tensor.clone() for index, batch in enumerate(batches) for name, tensor in batch.items()
    }
    save_file(tensors, bad.kept / f"batch-{process:05d}.safetensors")
    facts = {"step": bad.step, "reason": bad.reason, "layer": bad.layer, "documents": list(bad.documents)}
    write_json(bad.kept / f"update-{process:05d}.json", facts)


def _first_not_finite(model: nn.Module, forward: Callable[[Batch], Any], batch: Batch) -> str | None:
    """The module that first makes something that is not finite of finite inputs."""
    found: list[str] = []

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not found and _has_not_finite(output):
            found.append(name)

    # Inner modules end first, so the first one that is found is the innermost.
    hooks = [module.register_forward_hook(partial(look, name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            forward(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def _has_not_finite(output: Any) -> bool:
    if isinstance(output, Tensor):
        return output.is_floating_point() and not bool(torch.isfinite(_whole(output)).all())
    if isinstance(output, dict):
        output = tuple(output.values())
    return isinstance(output, list | tuple) and any(map(_has_not_finite, output))


def _whole(tensor: Tensor) -> Tensor:
    """A tensor that processes share, in one piece."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
