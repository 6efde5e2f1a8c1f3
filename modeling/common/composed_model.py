"""What every model with composed attention tells Transformers."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..layers.head_composition import DynamicComposition, init_composition
from ..ops.dcmha.attention import resolve_implementation


class ComposedPreTrainedModel(PreTrainedModel):
    """Flags for Transformers, initial weights, and the choice of the attention implementation."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values"]
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    # Context parallelism drops the mask and splits the keys; neither is possible while heads are composed.
    _supports_context_parallel = False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DynamicComposition):
            init_composition(module, self.config.compose_init_scale)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        """Where heads are composed only ops that know how are let in: any other would silently leave them apart."""
        if self.config.composes or attn_implementation in (None, "sdpa"):
            return resolve_implementation(attn_implementation, composed=self.config.composes)
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)
