"""Encoder-decoders: the encoder, encoder and decoder as one model, and the language modeling head."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.cache_utils import EncoderDecoderCache
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.utils import ModelOutput, can_return_tuple

from ..caches.names import cache_in, named_cache, takes_either_name
from ..ops.chunked_loss import IGNORED
from ..positions.absolute import check_position_range
from .decoder_inputs import count_positions
from .encoder import EncoderBody
from .input_checks import is_complete_mask
from .losses import check_skip_logits, read_by_loss
from .seq2seq_decoder import check_length, refuse_positions


class SourceEncoderBody(EncoderBody):
    """The forward pass of an encoder whose family defines `add_positions`, as `Seq2SeqDecoderBody` describes it."""

    add_positions: Callable[[Tensor, Tensor], Tensor]

    def embed(self, inputs_embeds: Tensor, position_ids: Tensor | None, attention_mask: Any = None) -> Tensor:
        """The first layer's hidden states `[B, S, E]`, from embeddings `[B, S, E]`.

        Positions count the real tokens of a mask `[B, S]` from 0. BART and Marian count padding on the left, too.
        """
        limit = self.config.max_position_embeddings
        check_length(inputs_embeds.shape[1], limit, "source")
        if position_ids is None:
            position_ids = count_positions(attention_mask, inputs_embeds, None)
        else:
            check_position_range(position_ids, limit)
        return self.add_positions(inputs_embeds, position_ids)


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

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """As in Transformers, but encoder and decoder share the embedding even with `tie_word_embeddings=False`.

        That option then unties the head alone.
        """
        expanded = super().get_expanded_tied_weights_keys(all_submodels)  # type: ignore[misc]
        return {**expanded, **self._tied_weights_keys}

    @takes_either_name
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: ModelOutput | tuple[Tensor, ...] | None = None,
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
            encoder_outputs: the encoder's output from an earlier call, whose first entry is `[B, S, E]`; the encoder
                is then not run.
            past_key_values: the decoder's cache of both attentions.

        Raises:
            ValueError: the arguments do not fit each other or the model.
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            raise ValueError(
                "give decoder_input_ids or decoder_inputs_embeds; or labels, which a head shifts (with "
                "label_smoothing_factor the Trainer keeps them to itself: use DataCollatorForSeq2Seq(tokenizer, model))"
            )
        refuse_positions(kwargs)
        refuse_complete_mask(attention_mask)
        if encoder_outputs is None:
            # `is_causal` is about the target. The encoder has no cache. Without `use_cache=False` Transformers would
            # read it from the configuration, and warn where layers are checkpointed, which breaks a compiled graph.
            options = {name: value for name, value in kwargs.items() if name != "is_causal"} | {"use_cache": False}
            encoder_outputs = self.encoder(
                input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **options
            )
        encoded = named_encoder_outputs(encoder_outputs)
        decoded = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoded[0],
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoded.last_hidden_state,
            decoder_hidden_states=decoded.hidden_states,
            decoder_attentions=decoded.attentions,
            cross_attentions=decoded.cross_attentions,
            encoder_last_hidden_state=encoded[0],
            encoder_hidden_states=getattr(encoded, "hidden_states", None),
            encoder_attentions=getattr(encoded, "attentions", None),
            **named_cache(cache_in(decoded)),
        )


class Seq2SeqLMHead:
    """Language modeling: `class XForConditionalGeneration(Seq2SeqLMHead, XPreTrainedModel, GenerationMixin)`."""

    _tied_weights_keys = {"lm_head.weight": "model.shared.weight"}
    # A checkpoint of the base model has no such bias. It then is zero, as in BART, and nothing has to be trained.
    _keys_to_ignore_on_load_missing: Any = ["final_logits_bias"]
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
        # Transformers would choose the loss by the name of the class, one that shifts labels. Here the inputs are
        # shifted, so the loss that compares logits and labels place by place is right.
        self.loss_type = "ForMaskedLM"
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As the family; `final_logits_bias`, a buffer that training does not change, starts as zeros."""
        super()._init_weights(module)  # type: ignore[misc]
        if module is self and self.final_logits_bias is not None:
            init.zeros_(self.final_logits_bias)

    @takes_either_name
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
        skip_logits: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Returns logits `[B, T, V]`, or `None` with `skip_logits`, and, with labels, the loss.

        Args:
            labels: `[B, T]` target tokens, -100 where no loss is wanted. Without `decoder_input_ids` the decoder reads
                them shifted to the right. With `num_items_in_batch` the loss is the sum over targets divided by it.
            skip_logits: return the loss without logits, which are then computed for the targets alone. The Trainer
                passes it in evaluation where `use_liger_kernel` is set.

        The other arguments are those of the base model.

        Raises:
            ValueError: the arguments do not fit each other or the model.
        """
        check_skip_logits(skip_logits, labels)
        if kwargs.get("z_loss"):
            raise ValueError("z_loss is not supported in encoder-decoders; leave it out")
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
        hidden_states, loss = outputs.last_hidden_state, None
        if labels is not None:
            hidden_states, labels = read_by_loss(hidden_states, labels, skip_logits)
        logits = self.lm_head(hidden_states)
        if self.final_logits_bias is not None:
            logits = logits + self.final_logits_bias
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        others = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return Seq2SeqLMOutput(loss=loss, logits=None if skip_logits else logits, **others)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """What the decoder reads to predict `labels` `[B, T]`, same shape. Transformers' data collators call it."""
        return shift_right(labels, self.config)

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None, **arguments: Any) -> Any:
        """As in Transformers, which calls this for static caches, but a mask `[B, past + T]` of the target is kept.

        From it the decoder counts positions; a complete mask does not tell which tokens are padding.
        """
        if attention_mask is not None:
            return attention_mask
        return create_masks_for_generate(attention_mask=attention_mask, **arguments)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        """As in Transformers; the bias of new tokens' logits is zero."""
        embeddings = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)  # type: ignore[misc]
        if self.final_logits_bias is not None:
            bias, tokens = self.final_logits_bias, embeddings.weight.shape[0]
            added = bias.new_zeros(1, max(tokens - bias.shape[1], 0))
            self.final_logits_bias = torch.cat([bias[:, :tokens], added], dim=1)
        return embeddings


def named_encoder_outputs(encoder_outputs: Any) -> Any:
    """An encoder's output as the caller gave it, or a tuple of its entries with their names.

    Raises:
        ValueError: it is neither, or does not begin with hidden states.
    """
    if isinstance(encoder_outputs, tuple | list):
        encoder_outputs = BaseModelOutput(*encoder_outputs[:3])
    if not isinstance(encoder_outputs, ModelOutput):
        raise ValueError(
            f"encoder_outputs is a {type(encoder_outputs).__name__}; give what the encoder returned, or a tuple that "
            "begins with its hidden states [batch, length, hidden_size]"
        )
    if not encoder_outputs:
        raise ValueError("encoder_outputs is empty; give what the encoder returned, or a tuple with its hidden states")
    return encoder_outputs


def refuse_complete_mask(attention_mask: Any) -> None:
    """Raises ValueError if the mask of an encoder-decoder's source has an entry for each pair of query and key."""
    if is_complete_mask(attention_mask):
        given = f"of shape {tuple(attention_mask.shape)}" if isinstance(attention_mask, Tensor) else "by layer type"
        raise ValueError(
            f"an attention_mask {given} cannot serve both the encoder and cross-attention, which have other "
            "queries; give one of shape [batch, source length]"
        )


def shift_right(labels: Tensor, config: PreTrainedConfig) -> Tensor:
    """The inputs `[B, T]` of the decoder: a start token, then `labels` `[B, T]` but the last, -100 replaced by padding.

    Raises:
        ValueError: the configuration has no start token or no padding token.
    """
    for name in ("decoder_start_token_id", "pad_token_id"):
        if getattr(config, name) is None:
            raise ValueError(f"{name} is None, but labels are shifted with it; set it, or give decoder_input_ids")
    start = torch.full_like(labels[:, :1], config.decoder_start_token_id)
    shifted = torch.cat([start, labels[:, :-1]], dim=1)
    return shifted.masked_fill(shifted == IGNORED, config.pad_token_id)
