"""The learning rate as a function of the step, for each group of weights."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ..common.errors import UserError
from .arguments import PretrainArguments
from .data.batch_order import whole
from .options.ranges import LARGEST_INTEGER


@dataclass(frozen=True)
class RateSchedule:
    """Linear warmup to `peak`, then down to `peak * min_ratio` at the last of `max_steps` updates, in one of two ways.

    `cosine` begins to fall at once, and ends at the peak if the warmup leaves a single update. `wsd` (warmup, stable,
    decay; MiniCPM, arXiv 2404.06395) stays at the peak until the last `decay_share` of the updates, in which it falls
    in a straight line, also if the warmup is not over by then: the two are multiplied. With a share of 0 it stays.

    Weights that are frozen before update `first_step` follow the same curve from there on, after a warmup of their own:
    Adam has no moments of them yet, and full steps along their first gradients would undo what they have learned.
    """

    peak: float
    warmup_steps: int
    max_steps: int
    min_ratio: float
    first_step: int = 0
    shape: str = "cosine"
    decay_share: float = 0.2

    def __call__(self, step: int) -> float:
        """The learning rate of update `step`, counted from 0; 0 before `first_step`."""
        if step < self.first_step:
            return 0.0
        rate = self.peak * (self.min_ratio + (1 - self.min_ratio) * self._height(step))
        learned = step - self.first_step + 1
        return rate * learned / self.warmup_steps if learned < self.warmup_steps else rate

    def _height(self, step: int) -> float:
        """Where the curve stands at `step`, without warmup: 1 at the peak, 0 at the end."""
        if self.shape == "wsd":
            falling = max(1, round(self.decay_share * self.max_steps))
            return min(1.0, (self.max_steps - 1 - step) / falling) if self.decay_share else 1.0
        progress = (step - self.warmup_steps) / max(1, self.max_steps - 1 - self.warmup_steps)
        return (1 + math.cos(math.pi * max(0.0, progress))) / 2


SCHEDULE_FIELDS = tuple(field.name for field in fields(RateSchedule))
# Fields that may change after a run has begun, under the conditions of `keeps_past`.
MAY_COME_LATE = ("max_steps", "decay_share")


def build_schedule(arguments: PretrainArguments, pass_length: float, global_batch: int) -> RateSchedule:
    """The schedule over `max_steps`, or over the updates that `epochs` passes of `pass_length` sequences take.

    Raises:
        UserError: a warmup, or the updates with frozen weights, would take the whole run, or `epochs` are too many.
    """
    max_steps = arguments.max_steps or whole((arguments.epochs or 1.0) * pass_length / global_batch)
    if max_steps > LARGEST_INTEGER:
        raise UserError(f"epochs={arguments.epochs} are more than {LARGEST_INTEGER} updates; lower it")
    warmup_steps = max_steps // 50 if arguments.warmup_steps is None else arguments.warmup_steps
    frozen_steps, length_steps = arguments.freeze_parent_steps, arguments.length_warmup_steps
    beginnings = {
        "warmup_steps": warmup_steps,
        "freeze_parent_steps": frozen_steps,
        # Otherwise no update would see a whole sequence, and later positions would stay untrained.
        "length_warmup_steps": length_steps,
    }
    for name, steps in beginnings.items():
        if steps >= max_steps:
            raise UserError(f"{name}={steps} must be below the {max_steps} updates of the run; lower it")
    return RateSchedule(
        peak=arguments.learning_rate,
        warmup_steps=warmup_steps,
        max_steps=max_steps,
        min_ratio=arguments.min_learning_rate_ratio,
        first_step=frozen_steps,
        shape=arguments.schedule,
        decay_share=arguments.decay_share,
    )


def group_schedules(schedule: RateSchedule, arguments: PretrainArguments) -> dict[bool, RateSchedule]:
    """The schedules of the weights that compose heads (True) and of all others (False).

    Without True, one schedule is for all weights. Weights that compose heads are never frozen.
    """
    if not arguments.treats_composition_apart:
        return {False: schedule}
    peak = arguments.composition_learning_rate or schedule.peak
    return {False: schedule, True: replace(schedule, peak=peak, first_step=0)}


def prepare_update(optimizer: torch.optim.Optimizer, schedules: Mapping[bool, RateSchedule], step: int) -> None:
    """Sets the learning rates of update `step`, between its backward pass and the clipping of its gradients.

    Groups that do not learn yet lose their gradients: optimizers skip a weight without a gradient, so neither decay nor
    moments begin before the weight's first update. Processes have exchanged all gradients by then.
    """
    for group in optimizer.param_groups:
        schedule = schedules[group["composes"]]
        group["lr"] = schedule(step) * group["rate_factor"]
        if step < schedule.first_step:
            for weight in group["params"]:
                weight.grad = None


def keeps_past(stored: Mapping[str, Any], now: Mapping[str, Any], step: int) -> bool:
    """Whether two fingerprints give the same learning rates to all updates before `step`, and the new run goes further.

    With `wsd` the learning rate depends on the number of updates only once it falls, so that number can change before.
    """
    if any(name not in stored or (name not in MAY_COME_LATE and stored[name] != now[name]) for name in SCHEDULE_FIELDS):
        return False
    before, after = (RateSchedule(**{name: values[name] for name in SCHEDULE_FIELDS}) for values in (stored, now))
    return step < after.max_steps and all(before(past) == after(past) for past in range(step))
