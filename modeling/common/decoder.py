"""The decoder without a head, as every family has it: its inputs, caches and masks, and the forward pass."""

from typing import Any

import torch  # noqa: F401 (llm-compressor runs a copy of `forward` in this namespace, and calls torch there)
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..caches.key_places import past_tokens_within
from ..caches.names import named_cache, takes_either_name
from ..layers.attention_interface import implementation_for
from ..positions.absolute import check_learned_positions
from ..serving.requirements import check_paged_cache
from .activation_checkpointing import check_keeps_cache, refuse_reentrant_checkpointing
from .decoder_inputs import (
    DecoderArguments,
    DecoderInputs,
    check_arguments,
    default_positions,
    packed_document_starts,
    refuse_later_tokens,
)
from .input_checks import check_batch, check_cached_length, check_layer_masks, check_tokens, mask_beside_borders
from .layer_types import typed_layers
from .packed_documents import borders_of, not_before_document


class DecoderBody:
    """The forward pass of a decoder, mixed in front of a family's `PreTrainedModel`.

    A family's model makes the modules that are annotated here. It overrides `prepare_inputs`, `prepare_cache` and
    `make_masks` where its layers need other inputs, caches or masks, and defines `layer_inputs`.
    """

    config: Any
    embed_tokens: nn.Module
    embed_positions: nn.Module | None
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
        elif kwargs.get("key_source") is None:  # engines make masks of their own, and say so by `is_causal=False`
            refuse_later_tokens(kwargs)
        given = DecoderArguments(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            borders_of(kwargs),
            kwargs.get("key_source"),
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
        """Checks the caller's arguments and fills in what is left out.

        Raises:
            ValueError: shapes do not fit, a row of the batch is all padding, a mask leaves out cached tokens or hides
                those of packed documents, or the cache has no room for the new tokens; or gradient checkpointing does
                not go with the cache or with learned tables.
        """
        config, cache = self.config, given.past_key_values
        refuse_reentrant_checkpointing(self)
        if cache is not None:
            check_keeps_cache(self, cache)
        check_tokens(given.input_ids, given.inputs_embeds)
        inputs_embeds = self.embed_tokens(given.input_ids) if given.inputs_embeds is None else given.inputs_embeds
        check_arguments(given, inputs_embeds)
        starts = packed_document_starts(given, inputs_embeds)
        if given.cu_seq_lens is not None:
            given = given._replace(attention_mask=mask_beside_borders(given.attention_mask))
        check_batch(inputs_embeds.shape[0], cache)
        if given.use_cache and cache is None:
            cache = DynamicCache(config=config)
        if cache is not None:
            self.prepare_cache(cache)
            check_cached_length(given.attention_mask, inputs_embeds, cache, config.sliding_window)
        position_ids = given.position_ids
        if position_ids is None:
            position_ids = default_positions(config, given.attention_mask, inputs_embeds, cache, starts)
        masks = given.attention_mask
        if isinstance(masks, dict):
            check_layer_masks(masks, config.layer_types)
        else:
            masks = self.make_masks(given, inputs_embeds, starts)
        return DecoderInputs(inputs_embeds, position_ids, cache, masks, starts)

    def embed(self, inputs: DecoderInputs) -> Tensor:
        """The first layer's hidden states `[B, T, E]`: the embeddings, with absolute positions added if there are any.

        Raises:
            ValueError: there are learned positions, and tokens beyond them.
        """
        embeddings = inputs.inputs_embeds
        if self.embed_positions is None:
            return embeddings
        if self.config.position_scheme == "learned":
            length, limit = embeddings.shape[1], self.config.max_position_embeddings
            past_tokens = past_tokens_within(inputs.past_key_values, length, limit)
            check_learned_positions(length, past_tokens, inputs.position_ids, limit)
        return embeddings + self.embed_positions(inputs.position_ids).to(embeddings.dtype)

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
            layer_type: LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING[layer_type](
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
