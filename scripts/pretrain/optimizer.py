"""AdamW's parameter groups and the learning rate as a function of the step."""

from typing import Any

import torch
from torch import nn

from .arguments import PretrainArguments
from .model import composition_weights


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
