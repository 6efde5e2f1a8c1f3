"""Uses the hyperparameters of a narrow model for wider ones: maximal update parametrization (muP, arXiv 2203.03466).

The model is `m` times as wide as the one for which the learning rate was chosen: `hidden_size`, `intermediate_size` and
the number of heads are `m` times as large, and `head_dim`, layers and `compose_rank` are the same. Initial weights and
learning rates are multiplied by the factors below, from Table 3 of the paper, for Adam. In this form no activation is
scaled, so a checkpoint needs no further fields:

| weights | initial size | learning rate |
|---|---|---|
| embeddings, norms, biases | 1 | 1 |
| linear layers | 1 / sqrt(m) | 1 / m; of Muon, whose updates have full rank, 1 / sqrt(m) |
| output head | 1 / m | 1 / m |
| `hidden_weight`, `gate_weight`, `static_weight` of a composition | 1, as it depends on the fan-in already | 1 / m |
| `factor_weight` | 1 | 1 / m^2 |

`factor_weight` makes the up factors, which are multiplied with a sum over all heads. They have to shrink like 1 / m
because the number of heads grows, and by another 1 / m because the fan-in of `factor_weight` grows with the heads. It
also makes the down factors, which are normalized over heads; the epsilon of this norm is therefore divided by m^2.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from dynattn.configuration.composed_config import ComposedConfig
from dynattn.modeling.layers.head_composition import DynamicComposition

from ..common.errors import UserError


def check_transfer(config: PreTrainedConfig, base_width: int | None) -> None:
    """Raises UserError if the rules of `base_width` do not cover the model."""
    if base_width is None:
        return
    if not isinstance(config, ComposedConfig):
        raise UserError(f"base_width is for dcformer and dcpythia, and this is a {config.model_type}; leave it out")
    if config.tie_word_embeddings:
        raise UserError(
            "base_width scales the head and not the embedding, which are tied; set tie_word_embeddings: false"
        )


def transfer_config(config: PreTrainedConfig, base_width: int | None) -> None:
    """Sets `compose_norm_eps` of a new model, the only field beside the sizes that depends on the width."""
    if base_width is not None:
        config.compose_norm_eps = config.compose_norm_eps / _multiple(config, base_width) ** 2


@torch.no_grad()
def scale_initial_weights(model: PreTrainedModel, base_width: int | None) -> None:
    """Scales new weights, which were drawn with the same standard deviation for all widths, by the table's factors."""
    if base_width is None:
        return
    multiple, head = _multiple(model.config, base_width), model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.mul_(1 / multiple if module is head else multiple**-0.5)


def rate_factors(model: nn.Module, base_width: int | None, orthogonal: Collection[Tensor]) -> dict[Tensor, float]:
    """The factors of the table for learning rates; weights that are left out have the factor 1.

    Args:
        orthogonal: weights that Muon updates.
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
