"""The losses of models of all kinds: what a forward pass is told, and what share of an update its loss is."""

import inspect
from typing import Any

from torch import Tensor, nn

from dynattn.modeling.common.decoder_heads import CausalLMHead
from dynattn.modeling.common.encoder_heads import MaskedLMHead


def loss_options(model: nn.Module, z_loss: float = 0.0) -> dict[str, Any]:
    """Keyword arguments for a forward pass that needs only the loss.

    With them, models of this package never hold all logits at once; other models take none.
    """
    if not isinstance(model, CausalLMHead | MaskedLMHead):
        return {}
    return {"skip_logits": True, "z_loss": z_loss} if z_loss else {"skip_logits": True}


def share_of_loss(model: nn.Module, loss: Tensor, targets: int, total: Tensor) -> Tensor:
    """The loss `[]` of a forward pass with `targets` targets as their sum divided by the `total` number.

    That is what models make of `num_items_in_batch`, but for those that compute a mean over their own targets.
    """
    return loss if computes_common_loss(type(model)) else loss * (targets / total)


def divide_router_loss(model: Any, passes: int) -> None:
    """Makes the router losses of the `passes` forward passes of an update, on all processes, add up to their mean.

    A mixture of experts adds the whole of it to each loss, however small the share of the targets is.
    """
    if hasattr(model, "router_aux_loss_coef"):
        model.router_aux_loss_coef /= passes


def without_router_loss(model: nn.Module) -> dict[str, bool]:
    """Keyword arguments for a forward pass whose loss is that of the targets alone."""
    return {"output_router_logits": False} if hasattr(model, "router_aux_loss_coef") else {}


def computes_common_loss(model_class: Any) -> bool:
    """Whether a model's loss is one that heeds `num_items_in_batch` and, of a causal model, shifts the labels.

    In Transformers this is the `loss_function` of a model. Some do not call it: their loss does neither.
    """
    forward = inspect.unwrap(model_class.forward)
    return not forward.__module__.startswith("transformers.") or "loss_function" in forward.__code__.co_names
