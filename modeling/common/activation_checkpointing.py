"""Selective activation checkpointing: recompute everything but the attention."""

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..caches.names import CACHE_NAME, OLD_NAME

OPS = torch.ops.aten
# The ops behind `scaled_dot_product_attention` on each device.
SDPA_OPS = {
    OPS._scaled_dot_product_flash_attention_for_cpu.default,
    OPS._scaled_dot_product_flash_attention.default,
    OPS._scaled_dot_product_efficient_attention.default,
    OPS._scaled_dot_product_cudnn_attention.default,
}


def checkpoint_activations(model: PreTrainedModel, **options: Any) -> None:
    """Makes a model recompute activations in its backward pass; `options` are those of `torch.utils.checkpoint`.

    Transformers renamed its method for this, and versions that have the new name warn about the old one.
    """
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options or None)


def keep_attention_outputs() -> tuple[Any, Any]:
    """A `context_fn` for `torch.utils.checkpoint` that keeps attention outputs and recomputes everything else.

    `model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": keep_attention_outputs})` uses it.
    Before Transformers 5.23 this method is called `gradient_checkpointing_enable`.

    The attention ops of this package already recompute their scores in the backward pass, so plain checkpointing would
    compute attention three times. With this function the outputs of these ops and of PyTorch's SDPA are kept: as many
    elements as the layer inputs that checkpointing keeps anyway. `eager` attention consists of many small ops and is
    recomputed. Trainer's arguments, which are written to JSON, cannot hold the function: pass it to the model.

    Returns:
        The contexts of the forward pass and of its recomputation.
    """
    return create_selective_checkpoint_contexts(_keep_attention)


def _keep_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # The operators of code that came with a checkpoint have longer namespaces (`custom_operators.py`).
    keep = getattr(op, "namespace", "").startswith("dynattn") or op in SDPA_OPS
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def drops_caches(model: Any) -> bool:
    """Whether layers get no cache now, because checkpointing would run them twice and fill it twice.

    From 5.24 on, the version that renamed caches, Transformers drops them only where gradients are computed.
    """
    runs_twice = torch.is_grad_enabled() or CACHE_NAME == OLD_NAME
    if not (model.training and runs_twice):  # asked first, because the properties below visit every module
        return False
    # Transformers 5.24 deprecates the older name.
    newer = hasattr(type(model), "is_activation_checkpointing")
    return model.is_activation_checkpointing if newer else model.is_gradient_checkpointing


def check_keeps_cache(model: Any, cache: Cache | None = None) -> None:
    """Raises ValueError if the model drops caches, and with them the tokens that `cache`, if it is given, holds."""
    if drops_caches(model) and (cache is None or int(cache.get_seq_length()) > 0):
        raise ValueError("gradient checkpointing drops caches in training; call model.eval() first, or give no cache")


def refuse_reentrant_checkpointing(model: Any) -> None:
    """Raises ValueError if a decoder with learned tables, which all layers share, trains with reentrant checkpointing.

    Its backward pass would go through the computation of a shared table once for each layer, where PyTorch allows it
    only once.
    """
    # Tables are found by their names, because PEFT may have put a module of another class around them.
    has_tables = any(getattr(model, name, None) is not None for name in ("position_bias", "position_gain"))
    if not (has_tables and model.gradient_checkpointing and model.training and torch.is_grad_enabled()):
        return
    # Absent in a function of another kind than Transformers', such as DeepSpeed's. PyTorch takes None for True.
    options = getattr(model._gradient_checkpointing_func, "keywords", None)
    if options is not None and options.get("use_reentrant") in (True, None):
        raise ValueError(
            "checkpointing with use_reentrant=True, which is PyTorch's default, cannot differentiate the learned "
            "tables of position_scheme='t5' and position_gain, which layers share; give {'use_reentrant': False} where "
            "it is enabled, as activation_checkpointing_kwargs (gradient_checkpointing_kwargs in older libraries)"
        )
