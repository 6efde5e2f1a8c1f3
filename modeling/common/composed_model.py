"""What the families with composed attention share: initial weights and the choice of the attention implementation."""

from typing import Any

import torch
from torch import nn

from ..layers.attention_interface import check_implementation
from ..layers.differential_heads import DifferentialHeads, init_differential
from ..layers.head_composition import DynamicComposition, init_composition
from ..ops.dcmha.attention import resolve_implementation
from ..positions.carope import FrequencyProjection
from .family_model import FamilyPreTrainedModel


class ComposedPreTrainedModel(FamilyPreTrainedModel):
    """Draws initial weights and chooses the attention implementation."""

    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, FrequencyProjection):
            module.init_bias()
        if isinstance(module, DynamicComposition):
            init_composition(module, self.config.compose_init_scale)
        if isinstance(module, DifferentialHeads):
            init_differential(module)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        """The attention implementation that the model runs with, from the one that the caller asked for.

        A model that composes heads takes only `COMPOSING_IMPLEMENTATIONS`; any other would silently ignore the
        composition. A model without composition is plain attention: its default is `sdpa`, and it takes every
        implementation that Transformers knows. If it reads tables by distance, which those would silently ignore too,
        it takes only `COMPOSING_IMPLEMENTATIONS` as well.

        Raises:
            ValueError: the implementation is unknown, or cannot compose heads or read tables.
        """
        if self.config.needs_own_ops:
            name = attn_implementation or resolve_implementation(None, composed=True)
            check_implementation(self.config, name)
            return name
        if attn_implementation in (None, "sdpa"):
            return "sdpa"
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)
