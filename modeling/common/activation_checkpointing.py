"""Activation checkpointing that does not repeat the attention."""

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

OPS = torch.ops.aten
# What `scaled_dot_product_attention` becomes on one device or another.
PLAIN_ATTENTION = {
    OPS._scaled_dot_product_flash_attention_for_cpu.default,
    OPS._scaled_dot_product_flash_attention.default,
    OPS._scaled_dot_product_efficient_attention.default,
    OPS._scaled_dot_product_cudnn_attention.default,
}


def keep_attention_outputs() -> tuple[Any, Any]:
    """A `context_fn` for `torch.utils.checkpoint`: attention is computed once, all else again in the backward pass.

        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": keep_attention_outputs})

    The ops of this package repeat themselves piece by piece in their backward pass, so that a layer that is repeated as
    a whole computes its attention three times. Kept are their outputs and those of PyTorch's own attention, as many
    numbers as checkpointing keeps of each layer's input anyway. `eager` implementations are made of many small ops and
    are repeated. Enable it on the model itself: Trainer's arguments cannot be written to JSON with a function in them.

    Returns:
        The contexts of the forward pass and of its repetition.
    """
    return create_selective_checkpoint_contexts(_keep_attention)


def _keep_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = getattr(op, "namespace", None) == "dynattn" or op in PLAIN_ATTENTION
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
