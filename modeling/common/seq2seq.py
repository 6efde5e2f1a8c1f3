"""Encoder-decoders: the decoder's forward pass, both halves together, and the language modeling head."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig
from transformers import initialization as init
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..layers.attention_interface import implementation_for
from .decoder_inputs import check_attention_mask, check_tokens
from .heads import check_labels


class Seq2SeqDecoderBody:
    """The forward pass of a decoder that reads an encoder's output, mixed in front of a family's `PreTrainedModel`.

    A family's decoder makes the modules that are annotated here, and defines `embed` and `prepare_cache`. It overrides
    `layer_arguments` where its layers need more.
    """

    config: Any
    embed_tokens: nn.Module
    layers: nn.ModuleList
    norm: nn.Module

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
            past_key_values: caches for both attentions; that of cross-attention is filled once.

        Raises:
            ValueError: the arguments do not fit each other or the model.
        """
        check_tokens(input_ids, inputs_embeds)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        cache = self._cache(past_key_values, use_cache)
        check_source(encoder_hidden_states, inputs_embeds)
        check_attention_mask(attention_mask, inputs_embeds, cache)
        check_attention_mask(encoder_attention_mask, encoder_hidden_states, cache)  # type: ignore[arg-type]
        past_tokens = 0 if cache is None else cache.get_seq_length()
        hidden_states = self.embed(inputs_embeds, past_tokens)
        masks = self._masks(inputs_embeds, attention_mask, encoder_hidden_states, encoder_attention_mask, cache)
        implementation = implementation_for(self.config, kwargs)
        arguments = self.layer_arguments(inputs_embeds, cache, masks, attention_mask, encoder_attention_mask)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                encoder_hidden_states,
                past_key_values=cache,
                use_cache=use_cache,
                implementation=implementation,
                **masks,
                **arguments,
                **kwargs,
            )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.norm(hidden_states), past_key_values=cache if use_cache else None
        )

    def embed(self, inputs_embeds: Tensor, past_tokens: int | Tensor) -> Tensor:
        """The first layer's hidden states `[B, T, E]`, from embeddings `[B, T, E]` after `past_tokens` others."""
        raise NotImplementedError

    def prepare_cache(self, cache: EncoderDecoderCache) -> None:
        """Makes `cache`, in place, keep what the layers of the family need; keys and values need nothing."""

    def layer_arguments(
        self,
        inputs_embeds: Tensor,
        cache: EncoderDecoderCache | None,
        masks: dict[str, Any],
        attention_mask: Tensor | None,
        encoder_attention_mask: Tensor | None,
    ) -> dict[str, Any]:
        """What else the family passes to all its layers, from arguments of `forward` and the `masks` made of them."""
        return {}

    def _masks(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        encoder_hidden_states: Tensor | None,
        encoder_attention_mask: Tensor | None,
        cache: EncoderDecoderCache | None,
    ) -> dict[str, Any]:
        """What a token sees of the target before it, and of the source, as the implementation wants its masks."""
        return {
            "attention_mask": create_causal_mask(
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                past_key_values=None if cache is None else cache.self_attention_cache,
            ),
            "encoder_attention_mask": create_bidirectional_mask(
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=encoder_attention_mask,
                encoder_hidden_states=encoder_hidden_states,
            ),
        }

    def _cache(self, cache: Cache | None, use_cache: bool | None) -> EncoderDecoderCache | None:
        """The caller's cache or, where one is wanted, a new one, made to keep what the layers need."""
        if cache is None and not use_cache:
            return None
        if cache is None:
            cache = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        if not isinstance(cache, EncoderDecoderCache):
            raise ValueError(
                f"past_key_values is a {type(cache).__name__}; an encoder-decoder keeps its own tokens and the source: "
                "give EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))"
            )
        self.prepare_cache(cache)
        return cache


class Seq2SeqBody:
    """Encoder and decoder with one embedding, `shared`; mixed in front of a family's `PreTrainedModel`."""

    shared: nn.Module
    encoder: nn.Module
    decoder: nn.Module
    _tied_weights_keys = {
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    }

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of source and target."""
        return self.shared

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the embedding of source and target."""
        self.shared = self.encoder.embed_tokens = self.decoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqModelOutput:
        """Returns the decoder's hidden states `[B, T, E]`, its cache, and the encoder's hidden states `[B, S, E]`.

        Args:
            input_ids: `[B, S]` source tokens; or give `inputs_embeds` `[B, S, E]`, or `encoder_outputs`.
            attention_mask: `[B, S]`, 1 for real source tokens.
            decoder_input_ids: `[B, T]` target tokens; or give `decoder_inputs_embeds` `[B, T, E]`.
            decoder_attention_mask: `[B, past + T]`, 1 for real target tokens.
            encoder_outputs: of a former call, whose first entry is `[B, S, E]`; the source is then not read.

        Raises:
            ValueError: the arguments do not fit each other or the model.
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            raise ValueError("give decoder_input_ids or decoder_inputs_embeds; or labels, which a head shifts")
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
            )
        elif not isinstance(encoder_outputs, BaseModelOutput):
            names = ("last_hidden_state", "hidden_states", "attentions")
            encoder_outputs = BaseModelOutput(**dict(zip(names, encoder_outputs, strict=False)))  # type: ignore[arg-type]
        assert isinstance(encoder_outputs, BaseModelOutput)
        decoded = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoder_outputs[0],
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoded.last_hidden_state,
            past_key_values=decoded.past_key_values,
            decoder_hidden_states=decoded.hidden_states,
            decoder_attentions=decoded.attentions,
            cross_attentions=decoded.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


class Seq2SeqLMHead:
    """`class XForConditionalGeneration(Seq2SeqLMHead, XPreTrainedModel, GenerationMixin)`."""

    _tied_weights_keys = {"lm_head.weight": "model.shared.weight"}
    base_class: ClassVar[type[nn.Module]]
    final_logits_bias: Tensor | None
    # Provided by PreTrainedModel.
    config: Any
    loss_function: Callable[..., Tensor]
    post_init: Callable[[], None]

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.model = self.base_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=getattr(config, "lm_head_bias", False))
        has_bias = getattr(config, "final_logits_bias", False)
        self.register_buffer("final_logits_bias", torch.zeros(1, config.vocab_size) if has_bias else None)  # type: ignore[attr-defined]
        # By its name the class would get the loss of causal models, which shifts labels; here the inputs are shifted.
        self.loss_type = "ForMaskedLM"
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Returns logits `[B, T, V]` and, with labels, the loss.

        Args:
            labels: `[B, T]` target tokens, -100 where no loss is wanted. Without `decoder_input_ids` the decoder reads
                them shifted to the right. With `num_items_in_batch` the loss is the sum over targets divided by it.

        The other arguments are those of the base model.

        Raises:
            ValueError: the arguments do not fit each other or the model.
        """
        if labels is not None:
            use_cache = bool(use_cache)
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(outputs.last_hidden_state)
        if self.final_logits_bias is not None:
            logits = logits + self.final_logits_bias
        loss = None
        if labels is not None:
            check_labels(labels, outputs.last_hidden_state)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return Seq2SeqLMOutput(loss=loss, logits=logits, **{key: outputs[key] for key in list(outputs)[1:]})

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """What the decoder reads to predict `labels` `[B, T]`, same shape; collators ask for it."""
        return shift_right(labels, self.config)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        """As in Transformers; the bias of new tokens' logits is zero."""
        embeddings = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)  # type: ignore[misc]
        if self.final_logits_bias is not None:
            bias, tokens = self.final_logits_bias, embeddings.weight.shape[0]
            added = bias.new_zeros(1, max(tokens - bias.shape[1], 0))
            self.final_logits_bias = torch.cat([bias[:, :tokens], added], dim=1)
        return embeddings


@torch.no_grad()
def init_final_logits_bias(module: nn.Module) -> None:
    """Sets the bias of the logits, which no optimizer learns, to zero where the model has one."""
    if isinstance(module, Seq2SeqLMHead) and module.final_logits_bias is not None:
        init.zeros_(module.final_logits_bias)


def shift_right(labels: Tensor, config: PreTrainedConfig) -> Tensor:
    """`labels` `[B, T]` one place later: the start token first, padding where labels ask for no loss.

    Raises:
        ValueError: the configuration has no start token or no padding token.
    """
    for name in ("decoder_start_token_id", "pad_token_id"):
        if getattr(config, name) is None:
            raise ValueError(f"{name} is None, but labels are shifted with it; set it, or give decoder_input_ids")
    start = torch.full_like(labels[:, :1], config.decoder_start_token_id)
    shifted = torch.cat([start, labels[:, :-1]], dim=1)
    return shifted.masked_fill(shifted == -100, config.pad_token_id)


def check_source(encoder_hidden_states: Tensor | None, inputs_embeds: Tensor) -> None:
    """Raises ValueError unless the encoder's output `[B, S, E]` has the batch of the decoder's inputs `[B, T, E]`."""
    if encoder_hidden_states is None:
        raise ValueError("encoder_hidden_states is None; the decoder needs the encoder's output [batch, length, width]")
    if encoder_hidden_states.ndim != 3 or encoder_hidden_states.shape[0] != inputs_embeds.shape[0]:
        raise ValueError(
            f"encoder output of shape {tuple(encoder_hidden_states.shape)} does not fit a target batch of "
            f"{inputs_embeds.shape[0]} rows; give [batch, length, width] with one row for each target"
        )


def check_positions(length: int, past_tokens: int | Tensor, limit: int, what: str) -> None:
    """Raises ValueError if tokens have positions beyond `limit`; the count of a static cache is not read."""
    if not isinstance(past_tokens, Tensor) and past_tokens + length > limit:
        raise ValueError(
            f"the {what} has {past_tokens + length} tokens, but there are max_position_embeddings ({limit}) positions; "
            "shorten it, or make a model with more"
        )
