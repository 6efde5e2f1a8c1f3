"""Finds updates that would spoil the weights, and for each one the layer where it began; keeps its batch for study."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors.torch import save_file
from torch import Tensor, nn

from ..common.atomic_file import write_json
from ..common.errors import UserError
from .outputs.checkpoint import TrainingProgress

# A loss is compared with the last `REMEMBERED` ones, once there are at least `ENOUGH` of them.
REMEMBERED, ENOUGH = 100, 20
Batch = dict[str, Tensor]


class DivergedError(UserError):
    """The run stopped because of a bad update: its loss or gradient is not finite, or its loss is a spike."""


class RollbackError(Exception):
    """An update was bad, and the run should go back to its newest checkpoint and leave out the data read since then."""


def incident_name(progress: TrainingProgress) -> str:
    """The name of the folder of a bad update.

    After a rollback an update of the same number reads other data, so the name then also has the number of the data.
    """
    data = f"-data-{progress.data_step + 1:06d}" if progress.skipped else ""
    return f"update-{progress.step + 1:06d}{data}"


def find_fault(loss: float, norm: float, recent: Sequence[float], threshold: float | None) -> str | None:
    """What is wrong with an update of this loss and gradient norm, or None.

    Args:
        recent: the losses of earlier updates.
        threshold: a loss this many standard deviations above the mean of `recent` is a spike; None for no limit.
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
    """Adds the loss of an update that was made to the `recent` ones, and drops the oldest."""
    recent.append(loss)
    del recent[:-REMEMBERED]


def find_layer(
    model: nn.Module,
    forward: Callable[[Batch], Any],
    batches: Sequence[Batch],
    gradient: Callable[[nn.Parameter], Tensor | None] = attrgetter("grad"),
) -> str:
    """Where an update went wrong, in words.

    It is the first module whose output is not finite, or else the last weight whose gradient is not finite, or else the
    weight whose gradient has the largest norm. All processes have to call this together, and each runs all of its
    batches, because with sharded weights a forward pass needs all processes. They agree on the first finding.

    Args:
        forward: runs the model on a batch.
        gradient: returns the gradient of a weight.
    """
    found = gather_object([name for batch in batches if (name := _first_not_finite(model, forward, batch))])
    if found:
        return f"the output of {found[0]}"
    gradients = ((name, gradient(weight)) for name, weight in model.named_parameters())
    values = {name: float(_whole(tensor.float().norm())) for name, tensor in gradients if tensor is not None}
    not_finite = [name for name, norm in values.items() if not math.isfinite(norm)]
    if not_finite:
        # The backward pass begins with the last layer, so that is where the fault began.
        return f"the gradient of {not_finite[-1]}"
    return f"the gradient of {max(values, key=values.__getitem__)}, the largest" if values else "the loss"


def keep_batch(folder: Path, facts: Mapping[str, Any], batches: Sequence[Batch], process: int) -> None:
    """Stores this process's batches `[B, T]` and the facts about the update, so that a user can study them."""
    folder.mkdir(parents=True, exist_ok=True)
    # Tensors of a batch may share memory, which safetensors refuses.
    tensors = {
        f"{index}.{name}": tensor.clone() for index, batch in enumerate(batches) for name, tensor in batch.items()
    }
    save_file(tensors, folder / f"batch-{process:05d}.safetensors")
    write_json(folder / f"update-{process:05d}.json", facts)


def describe(facts: Mapping[str, Any], kept: Path) -> str:
    """Step, reason, layer, batch and documents of a bad update in one line."""
    documents = facts["documents"]
    shown = ", ".join(documents[:3]) + (", ..." if len(documents) > 3 else "")
    return f"update {facts['step']} {facts['reason']}, first in {facts['layer']}; its batch ({shown}) is kept in {kept}"


def _first_not_finite(model: nn.Module, forward: Callable[[Batch], Any], batch: Batch) -> str | None:
    """The name of the first module to return an output that is not finite, or None."""
    found: list[str] = []

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not found and _has_not_finite(output):
            found.append(name)

    # An inner module returns before the outer one, so the first one found is the innermost. Code that was compiled
    # before the hooks were added would not call them.
    hooks = [module.register_forward_hook(partial(look, name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
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
    """A tensor in one piece, gathered from all processes if it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
