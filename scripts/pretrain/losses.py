"""The losses of models of all kinds: what a forward pass is told, and what share of an update its loss is."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from dynattn.modeling.common.decoder_heads import CausalLMHead
from dynattn.modeling.common.encoder_heads import MaskedLMHead

# Names by which models of Transformers know the weight of what they add to each loss: of the loss of routers, which
# JetMoE calls otherwise, and of Bamba's z-loss.
COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "z_loss_coefficient")


def loss_options(model: nn.Module, z_loss: float = 0.0) -> dict[str, Any]:
    """Keyword arguments for a forward pass that needs only the loss.

    With them, models of this package never hold all logits at once; other models take none.
    """
    if not isinstance(model, CausalLMHead | MaskedLMHead):
        return {}
    return {"skip_logits": True} | ({"z_loss": z_loss} if z_loss else {})


def share_of_loss(model: nn.Module, loss: Tensor, targets: int, total: Tensor) -> Tensor:
    """The loss `[]` of a forward pass with `targets` targets as their sum divided by the `total` number.

    That is what models make of `num_items_in_batch`, but for those that compute a mean over their own targets.
    """
    return loss if computes_common_loss(type(model)) else loss * (targets / total)


def divide_added_losses(model: nn.Module, passes: int) -> None:
    """Divides what a model adds to its loss, such as a router's auxiliary loss, by the forward passes of an update.

    Each forward pass adds all of it, however few targets it has. Divided, the sum over an update is a mean.
    """
    for name, coefficient in _coefficients(model).items():
        setattr(model, name, coefficient / passes)


@contextmanager
def without_added_losses(model: nn.Module) -> Iterator[None]:
    """In the block, the loss of a model is that of the targets alone."""
    coefficients = _coefficients(model)
    for name in coefficients:
        setattr(model, name, 0.0)
    try:
        yield
    finally:
        for name, coefficient in coefficients.items():
            setattr(model, name, coefficient)


def _coefficients(model: nn.Module) -> dict[str, float]:
    """Those of `COEFFICIENTS` that a model has."""
    found = {name: getattr(model, name, None) for name in COEFFICIENTS}
    return {name: coefficient for name, coefficient in found.items() if coefficient is not None}


def computes_common_loss(model_class: Any) -> bool:
    """Whether a model's loss is one that heeds `num_items_in_batch` and, of a causal model, shifts the labels.

    In Transformers this is the `loss_function` of a model. Some do not call it: their loss does neither.
    """
    forward = inspect.unwrap(model_class.forward)
    return not forward.__module__.startswith("transformers.") or "loss_function" in forward.__code__.co_names
