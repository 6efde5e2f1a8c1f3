"""Hyperparameters of a narrow model for wider ones: the maximal update parametrization (muP, arXiv 2203.03466).

A model is `m` times as wide as the one whose learning rate is given: `hidden_size`, `intermediate_size` and the number
of heads grow together, `head_dim`, layers and `compose_rank` stay. The table is that of the paper's Table 3 for Adam,
in which no activation gets a factor, so a checkpoint needs nothing that others do not have:

| weights | initial size | learning rate |
|---|---|---|
| embeddings, norms, biases | as it is | as it is |
| linear layers | 1 / sqrt(m) | 1 / m; of Muon, whose updates have full rank, 1 / sqrt(m) |
| output head | 1 / m | 1 / m |
| `hidden_weight`, `gate_weight`, `static_weight` of a composition | as it is, for it is made of the fan-in | 1 / m |
| `factor_weight` | as it is | 1 / m^2 |

An up factor meets a sum over all heads, so it has to shrink like 1 / m while the heads grow in number. Its layer's
fan-in grows with the heads, too, which makes 1 / m^2. Down factors come from the same tensor and are normed over heads;
the epsilon of that norm shrinks with their squares.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from dynattn.configuration.composed_config import ComposedConfig
from dynattn.modeling.layers.head_composition import DynamicComposition

from ..common.errors import UserError


def transfer_config(config: PreTrainedConfig, base_width: int | None) -> None:
    """Sets what of a configuration depends on the width beyond its sizes.

    Raises:
        UserError: the rules do not cover the model.
    """
    if base_width is None:
        return
    if not isinstance(config, ComposedConfig):
        raise UserError(f"base_width is for dcformer and dcpythia, and this is a {config.model_type}; leave it out")
    if config.tie_word_embeddings:
        raise UserError(
            "base_width scales the head and not the embedding, which are tied; set tie_word_embeddings: false"
        )
    config.compose_norm_eps = config.compose_norm_eps / _multiple(config, base_width) ** 2


@torch.no_grad()
def scale_initial_weights(model: PreTrainedModel, base_width: int | None) -> None:
    """Brings weights that were drawn with one standard deviation for all widths to the sizes of the table."""
    if base_width is None:
        return
    multiple, head = _multiple(model.config, base_width), model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.mul_(1 / multiple if module is head else multiple**-0.5)


def rate_factors(model: nn.Module, base_width: int | None, orthogonal: Collection[Tensor]) -> dict[Tensor, float]:
    """The learning rate of each weight as a multiple of the schedule's, where it is another than 1.

    Args:
        orthogonal: weights whose updates are Muon's.
    """
    if base_width is None or not isinstance(model, PreTrainedModel):
        return {}
    multiple, factors = _multiple(model.config, base_width), dict[Tensor, float]()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            factors[module.weight] = multiple**-0.5 if module.weight in orthogonal else 1 / multiple
        if isinstance(module, DynamicComposition):
            factors |= dict.fromkeys(module.parameters(), 1 / multiple)
            if module.factor_weight is not None:
                factors[module.factor_weight] = multiple**-2
    return factors


def _multiple(config: PreTrainedConfig, base_width: int) -> float:
    return config.hidden_size / base_width
