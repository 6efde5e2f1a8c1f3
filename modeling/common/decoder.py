"""The forward pass of a decoder: what every family does around and between its layers."""

from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..caches.composed_cache import keep_factors
from ..layers.attention_interface import implementation_for
from .decoder_inputs import prepare_decoder_inputs


class DecoderBody:
    """Mixed in front of a family's PreTrainedModel, which brings the modules: `class XModel(DecoderBody, X...)`."""

    config: Any
    embed_tokens: nn.Module
    layers: nn.ModuleList
    norm: nn.Module
    rotary_emb: nn.Module

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Returns hidden states `[B, T, E]`; the arguments are those of `prepare_decoder_inputs`.

        Any dynamic or static cache will do; it keeps composition factors beside keys and values from then on.

        Raises:
            ValueError: the arguments do not fit each other.
        """
        hidden_states, position_ids, past_key_values, masks, first_keys = prepare_decoder_inputs(
            self.config,
            self.embed_tokens,
            input_ids,
            inputs_embeds,
            attention_mask,
            position_ids,
            past_key_values,
            use_cache,
            kwargs.get("cu_seq_lens_q"),
        )
        if past_key_values is not None and self.config.composes_keys:
            keep_factors(past_key_values)
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for layer, layer_type in zip(self.layers, self.config.layer_types, strict=True):
            hidden_states = layer(
                hidden_states,
                attention_mask=masks[layer_type],
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                first_keys=first_keys,
                implementation=implementation_for(self.config, kwargs),
                **kwargs,
            )
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values if use_cache else None
        )
