"""The forward pass of bidirectional encoders: masks, then layers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask, create_bidirectional_sliding_window_mask
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..caches.names import NEW_NAME, OLD_NAME
from ..layers.attention_interface import implementation_for
from .input_checks import (
    check_attention_mask,
    check_layer_masks,
    check_position_ids,
    check_tokens,
    mask_beside_borders,
)
from .layer_types import layer_types_of, typed_layers
from .packed_documents import borders_of, packed_starts, same_document, starts_by_borders

BIDIRECTIONAL_MASK_MAKERS: dict[str, Callable[..., Any]] = {
    "full_attention": create_bidirectional_mask,
    "sliding_attention": create_bidirectional_sliding_window_mask,
}


class EncoderLayers:
    """Runs the layers of an encoder of text or images; mixed in front of a family's `PreTrainedModel`."""

    config: Any
    layers: nn.ModuleList

    def run_layers(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | dict[str, Tensor | None] | None,
        rotations: dict[str, tuple[Tensor, Tensor]] | None = None,
        document_starts: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Returns the hidden states `[B, T, E]` after the last layer.

        Args:
            hidden_states: `[B, T, E]`, the first layer's.
            attention_mask, document_starts: as `make_masks` takes them; `check_mask` has accepted the mask.
            rotations: rotary cosines and sines for each layer type, where the family rotates.

        Raises:
            ValueError: `is_causal` or a cache is given.
        """
        if kwargs.get("is_causal"):
            raise ValueError(
                "is_causal=True is not supported: tokens of an encoder see later ones, too; leave it out, or take a "
                "decoder"
            )
        if given := [name for name in (OLD_NAME, NEW_NAME) if kwargs.get(name) is not None]:
            raise ValueError(f"{given[0]} has no meaning for an encoder, which reads all tokens at once; leave it out")
        masks = self.make_masks(hidden_states, attention_mask, document_starts)
        implementation = implementation_for(self.config, kwargs)
        for layer, layer_type in typed_layers(self.layers, self.config):
            hidden_states = layer(
                hidden_states,
                attention_mask=masks[layer_type],
                position_embeddings=None if rotations is None else rotations[layer_type],
                implementation=implementation,
                **kwargs,
            )
        return hidden_states

    def check_mask(self, attention_mask: Any, inputs_embeds: Tensor) -> None:
        """Raises ValueError if a mask does not fit embeddings `[B, T, E]`, or hides a whole row of the batch."""
        if isinstance(attention_mask, dict):
            check_layer_masks(attention_mask, layer_types_of(self.config))
        check_attention_mask(attention_mask, inputs_embeds, None, exact=True)

    def make_masks(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | dict[str, Tensor | None] | None,
        document_starts: Tensor | None,
    ) -> dict[str, Tensor | None]:
        """Transformers' mask for each layer type, in the form that the attention implementation takes.

        Args:
            inputs_embeds: `[B, T, E]`.
            attention_mask: `[B, T]`, 1 for real tokens; or `[B, 1, T, T]`; or one prepared mask for each layer type.
            document_starts: `[B, T]`, index of the first token of each token's document. Documents then do not see each
                other, and the masks have an entry for each pair of tokens. None where every row is one document.
        """
        if isinstance(attention_mask, dict):
            return attention_mask
        apart = None if document_starts is None else same_document(document_starts)
        return {
            layer_type: BIDIRECTIONAL_MASK_MAKERS[layer_type](
                config=self.config, inputs_embeds=inputs_embeds, attention_mask=attention_mask, and_mask_function=apart
            )
            for layer_type in sorted(set(layer_types_of(self.config)))
        }


class EncoderBody(EncoderLayers):
    """The forward pass of an encoder of text.

    A family's model makes the modules that are annotated here, and defines `embed`. It overrides `rotations` where
    queries and keys are rotated.
    """

    embed_tokens: nn.Module
    norm: nn.Module

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Returns hidden states `[B, T, E]`.

        Args:
            input_ids: `[B, T]` token ids; or give `inputs_embeds` `[B, T, E]`.
            attention_mask: `[B, T]`, 1 for real tokens and 0 for padding on either side; or `[B, 1, T, T]`; or one
                prepared mask for each layer type.
            position_ids: `[B, T]`, by default counted from 0. Without an `attention_mask`, positions that restart mark
                the documents of a packed row, which then do not see each other. The borders `cu_seq_lens_q`
                `[documents + 1]` of a single row, a keyword, mark them instead, if they are given.

        Raises:
            ValueError: the arguments do not fit each other or the model.
        """
        check_tokens(input_ids, inputs_embeds)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        check_position_ids(position_ids, inputs_embeds)
        borders, counted = borders_of(kwargs), position_ids
        if borders is not None:
            attention_mask = mask_beside_borders(attention_mask)
            indices = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
            counted = indices - starts_by_borders(borders, inputs_embeds)  # from 0 in each document
            position_ids = counted if position_ids is None else position_ids
        self.check_mask(attention_mask, inputs_embeds)
        hidden_states = self.embed(inputs_embeds, position_ids, attention_mask)
        rotations = self.rotations(hidden_states, position_ids)
        starts = None
        if attention_mask is None and counted is not None:
            starts = packed_starts(counted, inputs_embeds.shape[:2])
        hidden_states = self.run_layers(hidden_states, attention_mask, rotations, starts, **kwargs)
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))

    def embed(self, inputs_embeds: Tensor, position_ids: Tensor | None, attention_mask: Any = None) -> Tensor:
        """The first layer's hidden states `[B, T, E]`, from embeddings `[B, T, E]`, positions `[B, T]` and the mask."""
        raise NotImplementedError

    def rotations(self, hidden_states: Tensor, position_ids: Tensor | None) -> dict[str, tuple[Tensor, Tensor]] | None:
        """Rotary cosines and sines `[B, T, rotary_dim]` for each layer type; none in most families."""
        return None
