"""AdamW's parameter groups and the learning rate as a function of the step."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from .arguments import PretrainArguments


@dataclass(frozen=True)
class CosineSchedule:
    """Linear warmup to `peak`, then a cosine to `peak * min_ratio` at the last of `max_steps` updates."""

    peak: float
    warmup_steps: int
    max_steps: int
    min_ratio: float

    def __call__(self, step: int) -> float:
        """The learning rate of update `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.max_steps - 1 - self.warmup_steps)
        cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
        return self.peak * (self.min_ratio + (1 - self.min_ratio) * cosine)


def build_optimizer(model: nn.Module, arguments: PretrainArguments) -> torch.optim.AdamW:
    """AdamW that decays matrices; embeddings (and a head tied to them), biases and norms are not decayed.

    An embedding row is only updated by the gradient when its token occurs, but would be decayed at every step.
    """
    embeddings = {
        id(weight) for module in model.modules() if isinstance(module, nn.Embedding) for weight in module.parameters()
    }
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    decayed = [weight for weight in weights if weight.ndim >= 2 and id(weight) not in embeddings]
    rest = [weight for weight in weights if weight.ndim < 2 or id(weight) in embeddings]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": arguments.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        lr=arguments.learning_rate,
        betas=(arguments.adam_beta1, arguments.adam_beta2),
        eps=arguments.adam_epsilon,
        fused=next(model.parameters()).is_cuda,
    )
