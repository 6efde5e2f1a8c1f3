"""Updates that would spoil the weights: what is wrong with one, where it comes from, and the batch, kept for later."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..common.atomic_file import write_json

# Losses by which a spike is judged, and how many of them there must be.
REMEMBERED, ENOUGH = 100, 20
Batch = dict[str, Tensor]


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


def find_layer(model: nn.Module, forward: Callable[[Batch], Any], batches: Sequence[Batch]) -> str:
    """The first module whose output is not finite, else the weight whose gradient is not, else the one of largest norm.

    Args:
        forward: gives a batch to the model.
    """
    for batch in batches:
        if name := _first_not_finite(model, forward, batch):
            return f"the output of {name}"
    norms = {name: weight.grad.float().norm() for name, weight in model.named_parameters() if weight.grad is not None}
    values = {name: float(_whole(norm)) for name, norm in norms.items()}
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
