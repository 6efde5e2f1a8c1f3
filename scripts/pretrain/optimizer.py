"""AdamW's parameter groups and the learning rate as a function of the step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .arguments import PretrainArguments
from .model import composition_weights


@dataclass(frozen=True)
class CosineSchedule:
    """Linear warmup to `peak`, then a cosine to `peak * min_ratio` at the last of `max_steps` updates.

    Weights that learn from update `first_step` on meet the same cosine, after a warmup of their own: Adam knows nothing
    of them yet, and full steps in the direction of its first gradients would undo what they have learned.
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


def build_optimizer(model: nn.Module, arguments: PretrainArguments) -> torch.optim.AdamW:
    """AdamW that decays matrices; embeddings (and a head tied to them), biases and norms are not decayed.

    An embedding row is only updated by the gradient when its token occurs, but would be decayed at every step.
    The groups are decayed weights, others and, where the arguments treat it apart, the composition's, all matrices.
    """
    embeddings = {
        id(weight) for module in model.modules() if isinstance(module, nn.Embedding) for weight in module.parameters()
    }
    composition = composition_weights(model) if arguments.treats_composition_apart else []
    apart = {id(weight) for weight in composition}
    weights = [weight for weight in model.parameters() if weight.requires_grad and id(weight) not in apart]
    decayed = [weight for weight in weights if weight.ndim >= 2 and id(weight) not in embeddings]
    rest = [weight for weight in weights if weight.ndim < 2 or id(weight) in embeddings]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": arguments.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    if composition:
        groups.append({"params": composition, "weight_decay": arguments.weight_decay})
    return torch.optim.AdamW(
        groups,
        lr=arguments.learning_rate,
        betas=(arguments.adam_beta1, arguments.adam_beta2),
        eps=arguments.adam_epsilon,
        fused=next(model.parameters()).is_cuda,
    )


def group_schedules(schedule: CosineSchedule, arguments: PretrainArguments) -> list[CosineSchedule]:
    """The schedule of each group of `build_optimizer`; that of the composition has its own peak and is never frozen."""
    if not arguments.treats_composition_apart:
        return [schedule, schedule]
    peak = arguments.composition_learning_rate or schedule.peak
    return [schedule, schedule, replace(schedule, peak=peak, first_step=0)]


def prepare_update(optimizer: torch.optim.Optimizer, schedules: Sequence[CosineSchedule], step: int) -> None:
    """Sets the learning rates of update `step`, between its backward pass and the clipping of its gradients.

    Groups that do not learn yet lose their gradients: AdamW passes a weight without one by, so that neither decay nor
    moments begin before its first update. Processes need not know, as they have exchanged all gradients.
    """
    for group, schedule in zip(optimizer.param_groups, schedules, strict=True):
        group["lr"] = schedule(step)
        if step < schedule.first_step:
            for weight in group["params"]:
                weight.grad = None
