"""AdamW and its parameter groups."""

import torch
from torch import nn

from .arguments import PretrainArguments
from .model import composition_weights


def build_optimizer(model: nn.Module, arguments: PretrainArguments) -> torch.optim.AdamW:
    """AdamW over the groups of `parameter_groups`, of which the second is not decayed."""
    decay = arguments.weight_decay
    groups = zip(parameter_groups(model, arguments), (decay, 0.0, decay), strict=False)
    return torch.optim.AdamW(
        [{"params": weights, "weight_decay": weight_decay} for weights, weight_decay in groups],
        lr=arguments.learning_rate,
        betas=(arguments.adam_beta1, arguments.adam_beta2),
        eps=arguments.adam_epsilon,
        fused=next(model.parameters()).is_cuda,
    )


def parameter_groups(model: nn.Module, arguments: PretrainArguments) -> list[list[nn.Parameter]]:
    """Matrices, then embeddings (and a head tied to them), biases and norms.

    If the arguments treat the composition apart, its weights, which are all matrices, are a third group. Embeddings do
    not count as matrices: a row gets a gradient only when its token occurs, but would be decayed at every step.
    """
    embeddings = {
        weight for module in model.modules() if isinstance(module, nn.Embedding) for weight in module.parameters()
    }
    composition = composition_weights(model) if arguments.treats_composition_apart else []
    apart = set(composition)
    weights = [weight for weight in model.parameters() if weight.requires_grad and weight not in apart]
    matrices = [weight for weight in weights if weight.ndim >= 2 and weight not in embeddings]
    rest = [weight for weight in weights if weight.ndim < 2 or weight in embeddings]
    return [matrices, rest, composition] if composition else [matrices, rest]
