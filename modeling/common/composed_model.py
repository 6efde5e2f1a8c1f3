"""What the families with composed attention share around their layers."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..caches.composed_cache import upgrade_to_composed_cache
from ..layers.differential_heads import DifferentialHeads, init_differential
from ..layers.head_composition import DynamicComposition, init_composition
from ..ops.dcmha.attention import COMPOSING, resolve_implementation
from .decoder import DecoderBody, DecoderPreTrainedModel
from .decoder_inputs import DecoderArguments, DecoderInputs, is_complete_mask
from .family_model import FamilyPreTrainedModel


class ComposedPreTrainedModel(FamilyPreTrainedModel):
    """Flags for Transformers, initial weights, and the choice of the attention implementation."""

    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DynamicComposition):
            init_composition(module, self.config.compose_init_scale)
        if isinstance(module, DifferentialHeads):
            init_differential(module)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        """The attention implementation that the model runs with, from the one that the caller asked for.

        A model that composes heads takes only the implementations that compose: `eager`, `chunked` (the default) and
        `triton`; any other would ignore the composition without a word. A model without composition is plain attention:
        its default is `sdpa`, and it takes every implementation that Transformers knows.

        Raises:
            ValueError: the implementation is unknown, or cannot compose heads.
        """
        if self.config.composes or attn_implementation in (None, "sdpa"):
            return resolve_implementation(attn_implementation, composed=self.config.composes)
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)


class ComposedDecoderPreTrainedModel(ComposedPreTrainedModel, DecoderPreTrainedModel):
    """What serving engines ask of a decoder."""

    @property
    def supports_paged_cache(self) -> bool:
        """True: what composition needs of earlier tokens are more channels of these rows."""
        return True

    @property
    def attends_to_rows(self) -> bool:
        """True for a model that composes heads, and for a plain one that runs with an implementation of ours."""
        return self.config.composes or self.config._attn_implementation in COMPOSING.keys() - {"eager"}


class ComposedDecoderBody(DecoderBody):
    """`DecoderBody` whose layers rotate queries and keys, and whose caches keep composition factors."""

    rotary_emb: nn.Module

    def prepare_cache(self, cache: Cache) -> None:
        """Makes `cache` keep composition factors beside keys and values if they depend on the key token."""
        if self.config.composes_keys:
            upgrade_to_composed_cache(cache)

    def layer_inputs(self, given: DecoderArguments, inputs: DecoderInputs) -> tuple[Tensor, dict[str, Any]]:
        """The embeddings `[B, T, E]`, and for all layers the rotary angles, positions and packed documents."""
        position_embeddings = self.rotary_emb(inputs.inputs_embeds, inputs.position_ids)
        return inputs.inputs_embeds, {
            "position_embeddings": position_embeddings,
            "position_ids": inputs.position_ids,
            "first_keys": None if is_complete_mask(given.attention_mask) else inputs.document_starts,
        }
