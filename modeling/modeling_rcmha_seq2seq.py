"""RCMHA as an encoder-decoder: relative convolutional attention in both directions (arXiv 2308.03429)."""

from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.utils.output_capturing import OutputRecorder

from ..configuration.configuration_rcmha_seq2seq import RCMHASeq2SeqConfig
from .caches.memory_cache import upgrade_to_memory_cache
from .caches.names import takes_either_name
from .common.input_checks import check_special_tokens
from .common.relative_model import RelativeLayer, RelativePreTrainedModel
from .common.seq2seq import Seq2SeqBody, Seq2SeqLMHead, SourceEncoderBody
from .common.seq2seq_decoder import Seq2SeqDecoderBody
from .layers.relative_attention import RCMHAAttention, RCMHACrossAttention
from .layers.segment import Segment, describe_segment, real_token_mask
from .ops.readable import is_readable
from .positions.absolute import make_absolute


class RCMHASeq2SeqEncoderLayer(RelativeLayer):
    """Pre-norm attention in both directions, then a pre-norm MLP, each with a residual."""

    def __init__(self, config: RCMHASeq2SeqConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx, is_causal=False)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Maps hidden states `[B, S, E]` to hidden states `[B, S, E]`; keywords are those of `RCMHAAttention`."""
        hidden_states = hidden_states + self.dropout(self.self_attn(self.input_layernorm(hidden_states), **kwargs)[0])
        return hidden_states + self.dropout(self.mlp(self.post_attention_layernorm(hidden_states)))


class RCMHASeq2SeqDecoderLayer(RelativeLayer):
    """Pre-norm causal attention, attention to the source, then the MLP, each with a residual."""

    def __init__(self, config: RCMHASeq2SeqConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.cross_attn = RCMHACrossAttention(config, layer_idx)
        self.cross_attn_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    @takes_either_name
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        segment: Segment,
        source_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Maps hidden states `[B, T, E]`, with those of the encoder `[B, S, E]`, to hidden states `[B, T, E]`."""
        attended, _ = self.self_attn(
            self.input_layernorm(hidden_states),
            segment=segment,
            attention_mask=attention_mask,
            past_key_values=None if past_key_values is None else past_key_values.self_attention_cache,
            **kwargs,
        )
        hidden_states = hidden_states + self.dropout(attended)
        read, _ = self.cross_attn(
            self.cross_attn_layernorm(hidden_states),
            key_value_states=encoder_hidden_states,
            segment=segment,
            source_mask=source_mask,
            attention_mask=encoder_attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        hidden_states = hidden_states + self.dropout(read)
        return hidden_states + self.dropout(self.mlp(self.post_attention_layernorm(hidden_states)))


class RCMHASeq2SeqPreTrainedModel(RelativePreTrainedModel):
    """What all RCMHA encoder-decoders share."""

    config: RCMHASeq2SeqConfig
    _no_split_modules = ["RCMHASeq2SeqEncoderLayer", "RCMHASeq2SeqDecoderLayer"]


class RCMHASeq2SeqStack(RCMHASeq2SeqPreTrainedModel):
    """What encoder and decoder share: embeddings, learned positions if configured, and the last norm."""

    embed_tokens: nn.Module
    norm: nn.Module

    def __init__(self, config: RCMHASeq2SeqConfig, layers: list[nn.Module]) -> None:
        super().__init__(config)
        self.embed_tokens = make_embedding(config)
        self.embed_positions = make_absolute(config)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.gradient_checkpointing = False
        self.post_init()

    def add_positions(self, inputs_embeds: Tensor, position_ids: Tensor) -> Tensor:
        """The first layer's hidden states `[B, T, E]`, from embeddings `[B, T, E]` at positions `[.., T]`."""
        if self.embed_positions is not None:
            inputs_embeds = inputs_embeds + self.embed_positions(position_ids)
        return self.dropout(inputs_embeds)


class RCMHASeq2SeqEncoder(SourceEncoderBody, RCMHASeq2SeqStack):
    """The encoder: every token sees all tokens of the source."""

    _can_record_outputs = {"hidden_states": RCMHASeq2SeqEncoderLayer, "attentions": RCMHAAttention}

    def __init__(self, config: RCMHASeq2SeqConfig) -> None:
        super().__init__(config, [RCMHASeq2SeqEncoderLayer(config, layer) for layer in range(config.num_hidden_layers)])

    def run_layers(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        rotations: dict[str, tuple[Tensor, Tensor]] | None = None,
        document_starts: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """As the base, for hidden states `[B, S, E]`; also tells the convolutions which tokens are padding.

        Raises:
            ValueError: as the base; or rows pack several documents, across which convolutions would read.
        """
        if self.config.convolves and document_starts is not None:
            refuse_packed_documents(document_starts)
        segment = Segment(hidden_states.shape[1], token_mask=source_token_mask(self.config, attention_mask))
        return super().run_layers(hidden_states, attention_mask, rotations, document_starts, segment=segment, **kwargs)


class RCMHASeq2SeqDecoder(Seq2SeqDecoderBody, RCMHASeq2SeqStack):
    """The decoder: a token sees itself, earlier tokens, and the source."""

    _can_record_outputs = {
        "hidden_states": RCMHASeq2SeqDecoderLayer,
        "attentions": RCMHAAttention,
        "cross_attentions": OutputRecorder(RCMHACrossAttention, index=1),
    }

    def __init__(self, config: RCMHASeq2SeqConfig) -> None:
        layers = range(config.decoder_layers or 0)
        super().__init__(config, [RCMHASeq2SeqDecoderLayer(config, layer) for layer in layers])

    def prepare_cache(self, cache: EncoderDecoderCache) -> None:
        """Makes the self-attention cache also keep the earlier tokens that convolutions read."""
        upgrade_to_memory_cache(cache.self_attention_cache, self.config, layers=len(self.layers))

    def layer_arguments(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        encoder_hidden_states: Tensor | None,
        encoder_attention_mask: Tensor | None,
        cache: Cache | None,
    ) -> dict[str, Any]:
        """As the base, with the `Segment` of the target, and which source tokens are real `[B, S]`."""
        arguments = super().layer_arguments(
            inputs_embeds, attention_mask, encoder_hidden_states, encoder_attention_mask, cache
        )
        mask = arguments["attention_mask"]
        segment = describe_segment(self.config, inputs_embeds, cache, mask, given_mask=attention_mask)
        return {**arguments, "segment": segment, "source_mask": source_token_mask(self.config, encoder_attention_mask)}


class RCMHASeq2SeqModel(Seq2SeqBody, RCMHASeq2SeqPreTrainedModel):
    """Encoder and decoder without a head."""

    def __init__(self, config: RCMHASeq2SeqConfig) -> None:
        super().__init__(config)
        self.shared = make_embedding(config)
        self.encoder, self.decoder = RCMHASeq2SeqEncoder(config), RCMHASeq2SeqDecoder(config)
        self.post_init()


class RCMHASeq2SeqForConditionalGeneration(Seq2SeqLMHead, RCMHASeq2SeqPreTrainedModel, GenerationMixin):
    """Encoder and decoder with a language modeling head: translation, summarization, denoising."""

    base_class = RCMHASeq2SeqModel


def source_token_mask(config: RCMHASeq2SeqConfig, attention_mask: Any) -> Tensor | None:
    """Which source tokens are real and not padding, `[B, S]`; None where all are, or nothing is convolved."""
    if isinstance(attention_mask, dict):
        attention_mask = attention_mask["full_attention"]
    if not config.convolves or attention_mask is None:
        return None
    length = attention_mask.shape[-1]
    mask = attention_mask if attention_mask.ndim == 4 else None
    return real_token_mask(attention_mask, mask, length, length, None, end=length)


def refuse_packed_documents(starts: Tensor) -> None:
    """Raises ValueError, where values can be read, for rows of several documents, whose `starts` are `[B, S]`."""
    if is_readable(starts):
        raise ValueError(
            f"position_ids restart at token {int(starts.max())}, where convolutions would read across documents; give "
            "one document per row, or an attention_type without convolutions"
        )


def make_embedding(config: RCMHASeq2SeqConfig) -> nn.Embedding:
    """The token embedding, whose row of the padding token gets no gradient; ValueError if it lacks a special token."""
    check_special_tokens(config, "pad_token_id", "decoder_start_token_id")
    return nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)


__all__ = ["RCMHASeq2SeqForConditionalGeneration", "RCMHASeq2SeqModel", "RCMHASeq2SeqPreTrainedModel"]
