"""The decoder without a head, as every family has it: flags for Transformers and the forward pass."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..caches.names import named_cache, takes_either_name
from ..layers.attention_interface import implementation_for
from ..serving.requirements import check_paged_cache
from .activation_checkpointing import check_keeps_cache
from .decoder_inputs import DecoderArguments, DecoderInputs, prepare_decoder_inputs, refuse_later_tokens
from .family_model import FamilyPreTrainedModel
from .layer_types import typed_layers
from .packed_documents import borders_of, not_before_document

MASK_MAKERS: dict[str, Callable[..., Any]] = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
}


class DecoderPreTrainedModel(FamilyPreTrainedModel):
    """Tells serving engines what a decoder needs: by default more than a paged cache."""

    @property
    def supports_paged_cache(self) -> bool:
        """Whether a paged cache, which keeps a row of keys and one of values for a token, is all that layers need."""
        return False

    @property
    def attends_to_paged_cache(self) -> bool:
        """Whether this package attends to a paged cache, or leaves that to an implementation of Transformers."""
        return False


class DecoderBody:
    """The forward pass of a decoder, mixed in front of a family's `PreTrainedModel`.

    A family's model makes the modules that are annotated here. It overrides `prepare_inputs`, `prepare_cache` and
    `make_masks` where its layers need other inputs, caches or masks, and defines `layer_inputs`.
    """

    config: Any
    embed_tokens: nn.Module
    layers: nn.ModuleList
    norm: nn.Module

    @takes_either_name
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
        """Returns hidden states `[B, T, E]` and the cache; the arguments are those of `DecoderArguments`.

        Raises:
            ValueError: the arguments do not fit each other or the model.
        """
        if kwargs.get("cache") is not None:
            check_paged_cache(self, raw=True)
        elif kwargs.get("paged") is None:  # serving engines make masks of their own, and say so by `is_causal=False`
            refuse_later_tokens(kwargs)
        given = DecoderArguments(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            borders_of(kwargs),
            kwargs.get("paged"),
        )
        inputs = self.prepare_inputs(given)
        hidden_states, layer_arguments = self.layer_inputs(given, inputs)
        implementation = implementation_for(self.config, kwargs)
        passed = named_cache(inputs.past_key_values) | kwargs  # `kwargs` may hold the paged cache of a serving engine
        for layer, layer_type in typed_layers(self.layers, self.config):
            hidden_states = layer(
                hidden_states,
                attention_mask=inputs.masks[layer_type],
                use_cache=use_cache,
                implementation=implementation,
                **layer_arguments[layer_type],
                **passed,
            )
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states),
            **named_cache(inputs.past_key_values if use_cache else None),
        )

    def prepare_inputs(self, given: DecoderArguments) -> DecoderInputs:
        """Checks and completes the caller's arguments."""
        if given.past_key_values is not None:
            check_keeps_cache(self, given.past_key_values)
        return prepare_decoder_inputs(self, given)

    def prepare_cache(self, cache: Cache) -> None:
        """Makes `cache`, in place, keep what the family's layers need besides keys and values; here nothing."""

    def make_masks(
        self, given: DecoderArguments, inputs_embeds: Tensor, starts: Tensor | None
    ) -> dict[str, Tensor | None]:
        """Transformers' mask for each layer type, in the form that the attention implementation takes.

        Transformers would find packed documents in the positions by itself, but takes every jump for a border. So the
        positions are not passed on.

        Args:
            inputs_embeds: `[B, T, E]`.
            starts: index of the first token of each token's document, `[B, T]`, to keep packed documents apart.
        """
        apart = None if starts is None else not_before_document(starts)
        return {
            layer_type: MASK_MAKERS[layer_type](
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=given.attention_mask,
                and_mask_function=apart,
                **named_cache(given.past_key_values),
            )
            for layer_type in sorted(set(self.config.layer_types))
        }

    def layer_inputs(self, given: DecoderArguments, inputs: DecoderInputs) -> tuple[Tensor, dict[str, dict[str, Any]]]:
        """The first layer's hidden states `[B, T, E]`, and what the family passes to the layers of each type."""
        raise NotImplementedError
