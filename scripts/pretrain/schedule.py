"""The learning rate as a function of the step, for each group of weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..common.errors import UserError
from .arguments import PretrainArguments


@dataclass(frozen=True)
class CosineSchedule:
    """Linear warmup to `peak`, then a cosine to `peak * min_ratio` at the last of `max_steps` updates.

    Weights that learn from update `first_step` on follow the same cosine, after a warmup of their own: Adam has no
    moments of them yet, and full steps in the direction of their first gradients would undo what they have learned.
    """

    peak: float
    warmup_steps: int
    max_steps: int
    min_ratio: float
    first_step: int = 0

    def __call__(self, step: int) -> float:
        """The learning rate of update `step`, counted from 0; 0 before `first_step`."""
        if step < self.first_step:
            return 0.0
        progress = (step - self.warmup_steps) / max(1, self.max_steps - 1 - self.warmup_steps)
        cosine = (1 + math.cos(math.pi * min(1.0, max(0.0, progress)))) / 2
        rate = self.peak * (self.min_ratio + (1 - self.min_ratio) * cosine)
        learned = step - self.first_step + 1
        return rate * learned / self.warmup_steps if learned < self.warmup_steps else rate


def build_schedule(arguments: PretrainArguments, sequences: int, global_batch: int) -> CosineSchedule:
    """The schedule over `max_steps`, or over the updates that `epochs` passes over the sequences take.

    Raises:
        UserError: warmup, or the updates with frozen weights, would take the whole run.
    """
    max_steps = arguments.max_steps or math.ceil((arguments.epochs or 1.0) * sequences / global_batch)
    warmup_steps = max_steps // 50 if arguments.warmup_steps is None else arguments.warmup_steps
    frozen_steps = arguments.freeze_parent_steps
    for name, steps in {"warmup_steps": warmup_steps, "freeze_parent_steps": frozen_steps}.items():
        if steps >= max_steps:
            raise UserError(f"{name}={steps} must be below the {max_steps} updates of the run; lower it")
    return CosineSchedule(
        arguments.learning_rate, warmup_steps, max_steps, arguments.min_learning_rate_ratio, frozen_steps
    )


def group_schedules(schedule: CosineSchedule, arguments: PretrainArguments) -> list[CosineSchedule]:
    """The schedule of each group of `build_optimizer`; that of the composition has its own peak and is never frozen."""
    if not arguments.treats_composition_apart:
        return [schedule, schedule]
    peak = arguments.composition_learning_rate or schedule.peak
    return [schedule, schedule, replace(schedule, peak=peak, first_step=0)]


def prepare_update(optimizer: torch.optim.Optimizer, schedules: Sequence[CosineSchedule], step: int) -> None:
    """Sets the learning rates of update `step`, between its backward pass and the clipping of its gradients.

    Groups that do not learn yet lose their gradients: AdamW skips a weight without a gradient, so neither decay nor
    moments begin before the weight's first update. Processes have exchanged all gradients by then.
    """
    for group, schedule in zip(optimizer.param_groups, schedules, strict=True):
        group["lr"] = schedule(step)
        if step < schedule.first_step:
            for weight in group["params"]:
                weight.grad = None
