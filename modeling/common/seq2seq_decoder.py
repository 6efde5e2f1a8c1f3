"""The decoder of an encoder-decoder: its forward pass, its masks and caches, and checks of its arguments."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, EncoderDecoderCache, StaticLayer
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import capture_outputs

from ..caches.composed_cache import QUANTIZED_LAYERS
from ..caches.key_places import known_token_count, past_tokens_within
from ..caches.names import named_cache, takes_either_name
from ..layers.attention_interface import implementation_for
from .activation_checkpointing import check_keeps_cache
from .decoder_inputs import count_positions, refuse_later_tokens
from .input_checks import check_attention_mask, check_batch, check_cached_length, check_tokens


class Seq2SeqDecoderBody:
    """The forward pass of a decoder that reads an encoder's output, mixed in front of a family's `PreTrainedModel`.

    A family's decoder makes the modules that are annotated here, and defines `add_positions`. It overrides
    `prepare_cache` and `layer_arguments` where its layers need more.
    """

    config: Any
    embed_tokens: nn.Module
    layers: nn.ModuleList
    norm: nn.Module
    # From embeddings `[B, T, E]` and positions `[.., T]` to the first layer's hidden states `[B, T, E]`. A method here
    # would hide that of the family's class, which comes later among the bases.
    add_positions: Callable[[Tensor, Tensor], Tensor]

    @takes_either_name
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Returns hidden states `[B, T, E]` and the cache.

        Args:
            input_ids: `[B, T]` token ids; or give `inputs_embeds` `[B, T, E]`.
            attention_mask: `[B, past + T]`, 1 for real tokens; or `[B, 1, T, past + T]`.
            encoder_hidden_states: `[B, S, E]`.
            encoder_attention_mask: `[B, S]`, 1 for real tokens.
            past_key_values: caches for both attentions; that of cross-attention is filled in the first call only.

        Raises:
            ValueError: the arguments do not fit each other or the model.
        """
        refuse_positions(kwargs)
        refuse_later_tokens(kwargs)
        kwargs.pop("is_causal", None)  # cross-attention would obey it, too
        check_tokens(input_ids, inputs_embeds)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        check_source(encoder_hidden_states, inputs_embeds, self.config.hidden_size)
        refuse_masks_by_layer_type(attention_mask, encoder_attention_mask)
        cache = self._cache(past_key_values, use_cache, encoder_hidden_states)  # type: ignore[arg-type]
        own = None if cache is None else cache.self_attention_cache
        exact = past_key_values is None and not is_tracing(inputs_embeds)  # exported sizes may differ
        check_target(attention_mask, inputs_embeds, own, self.config.max_position_embeddings, exact=exact)
        check_attention_mask(encoder_attention_mask, encoder_hidden_states, own, exact=True)  # type: ignore[arg-type]
        hidden_states = self.add_positions(inputs_embeds, count_positions(attention_mask, inputs_embeds, own))
        arguments = self.layer_arguments(
            inputs_embeds, attention_mask, encoder_hidden_states, encoder_attention_mask, own
        )
        implementation = implementation_for(self.config, kwargs)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                encoder_hidden_states,
                use_cache=use_cache,
                implementation=implementation,
                **named_cache(cache),
                **arguments,
                **kwargs,
            )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.norm(hidden_states), **named_cache(cache if use_cache else None)
        )

    def prepare_cache(self, cache: EncoderDecoderCache) -> None:
        """Makes `cache`, in place, keep what the family's layers need besides keys and values; here nothing."""

    def layer_arguments(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        encoder_hidden_states: Tensor | None,
        encoder_attention_mask: Tensor | None,
        cache: Cache | None,
    ) -> dict[str, Any]:
        """What all layers get, from arguments of `forward` and the cache of self-attention: here the masks.

        They are those of self-attention and of cross-attention, in the form that the implementation takes.
        """
        return {
            "attention_mask": create_causal_mask(
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                **named_cache(cache),
            ),
            "encoder_attention_mask": create_bidirectional_mask(
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=encoder_attention_mask,
                encoder_hidden_states=encoder_hidden_states,
            ),
        }

    def _cache(self, cache: Cache | None, use_cache: bool | None, source: Tensor) -> EncoderDecoderCache | None:
        """The caller's cache, or a new one if `use_cache` asks for it, prepared by `prepare_cache`.

        Args:
            source: `[B, S, E]`, whose keys and values it has to keep.
        """
        if cache is not None:
            check_keeps_cache(self, cache)
        elif use_cache:
            cache = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        else:
            return None
        if not isinstance(cache, EncoderDecoderCache):
            raise ValueError(
                f"past_key_values is a {type(cache).__name__}; an encoder-decoder keeps its own tokens and the source: "
                "give EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))"
            )
        check_cross_attention_cache(cache.cross_attention_cache, source)
        self.prepare_cache(cache)
        return cache


def refuse_positions(arguments: dict[str, Any]) -> None:
    """Raises ValueError if positions are among the arguments of an encoder-decoder or its decoder.

    The encoder by itself takes them. But cross-attention cannot tell which document of a packed source is a target's.
    """
    for name in ("position_ids", "decoder_position_ids", "cu_seq_lens_q", "cu_seq_lens_k"):
        if (positions := arguments.get(name)) is not None:
            raise ValueError(
                f"{name} of shape {tuple(positions.shape)} are given, but an encoder-decoder counts positions itself, "
                "and a target reads its whole source; leave them out, and give one document per row"
            )


def check_source(encoder_hidden_states: Tensor | None, inputs_embeds: Tensor, width: int) -> None:
    """Raises ValueError unless the encoder's output is `[B, S, width]` for the decoder's inputs `[B, T, E]`."""
    if encoder_hidden_states is None:
        raise ValueError("encoder_hidden_states is None; the decoder needs the encoder's output [batch, length, width]")
    shape, rows = tuple(encoder_hidden_states.shape), inputs_embeds.shape[0]
    if len(shape) != 3 or shape[0] != rows or shape[2] != width:
        raise ValueError(
            f"encoder output of shape {shape} does not fit a target batch of {rows} rows and hidden_size ({width}); "
            "give [batch, length, hidden_size] with one row for each target"
        )


def refuse_masks_by_layer_type(*masks: Any) -> None:
    """Raises ValueError if one of a decoder's masks is a dictionary, as models with windows take it."""
    for mask in masks:
        if isinstance(mask, dict):
            raise ValueError(
                f"a mask of the decoder is a dictionary by layer type {sorted(mask)}, but its layers are all alike; "
                "give one mask of shape [batch, length] or [batch, 1, queries, keys]"
            )


def check_cross_attention_cache(cache: Cache, source: Tensor) -> None:
    """Raises ValueError unless `cache` can keep whole keys of a source `[B, S, E]`, which are read in each step.

    A quantized one holds none, a static one may have no room for them, and one that holds keys of a source of another
    size is of another source, which would be read instead. Sizes are not compared while tracing.
    """
    for layer in cache.layers:
        if isinstance(layer, QUANTIZED_LAYERS):
            raise ValueError(
                f"a {type(layer).__name__} cannot keep the keys of the source for cross-attention; give "
                "EncoderDecoderCache(cache, DynamicCache(config=config))"
            )
    if is_tracing(source):
        return
    check_batch(source.shape[0], cache)
    length, held = source.shape[1], known_token_count(cache)
    if held and held != length:
        raise ValueError(
            f"the cache for cross-attention holds a source of {held} tokens, but the encoder's output has {length}; "
            "give the source that filled it, or start with an empty cache"
        )
    rooms = [layer.max_cache_len for layer in cache.layers if isinstance(layer, StaticLayer)]
    if rooms and min(rooms) < length:
        raise ValueError(
            f"the cache for cross-attention has room for max_cache_len={min(rooms)} tokens of the source, which has "
            f"{length}; make it with max_cache_len={length} or more"
        )


def check_target(attention_mask: Any, inputs_embeds: Tensor, cache: Cache | None, limit: int, *, exact: bool) -> None:
    """Raises ValueError unless the target fits its mask, the cache of self-attention and `limit` positions.

    Args:
        attention_mask, exact: as in `check_attention_mask`.
        inputs_embeds: `[B, T, E]`.
    """
    batch, length = inputs_embeds.shape[:2]
    check_batch(batch, cache)
    check_attention_mask(attention_mask, inputs_embeds, cache, exact=exact)
    if cache is not None:
        check_cached_length(attention_mask, inputs_embeds, cache)
    past_tokens = past_tokens_within(cache, length, limit)
    if past_tokens is not None:
        check_length(past_tokens + length, limit, "target")


def check_length(tokens: int, limit: int, what: str) -> None:
    """Raises ValueError if a sequence, which the message calls `what`, has more `tokens` than `limit` positions."""
    if tokens > limit:
        raise ValueError(
            f"the {what} has {tokens} tokens, but there are max_position_embeddings ({limit}) positions; shorten it, "
            "or make a model with more"
        )
