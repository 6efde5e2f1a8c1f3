"""DCBart: an encoder-decoder like BART and Marian, with dynamically composed attention heads (arXiv 2405.08553)."""

import math
from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.output_capturing import OutputRecorder

from ..configuration.configuration_dcbart import DCBartConfig
from .caches.composed_cache import upgrade_to_composed_cache
from .caches.names import takes_either_name
from .common.composed_model import ComposedPreTrainedModel
from .common.input_checks import check_special_tokens
from .common.seq2seq import Seq2SeqBody, Seq2SeqLMHead, SourceEncoderBody
from .common.seq2seq_decoder import Seq2SeqDecoderBody
from .layers.composed_attention import ComposedAttention
from .layers.mlp import MLP
from .positions.absolute import SinusoidalTable


class DCBartLayer(GradientCheckpointingLayer):
    """What layers of encoder and decoder share: the MLP, the norms, and the order of sublayer, residual and norm."""

    def __init__(self, config: DCBartConfig) -> None:
        super().__init__()
        self.normalize_before = config.normalize_before
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.self_attn_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = MLP(
            config.hidden_size, config.intermediate_size, config.hidden_act, dropout=config.activation_dropout
        )
        self.mlp_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def add(self, hidden_states: Tensor, norm: nn.Module, sublayer: nn.Module, **kwargs: Any) -> Tensor:
        """`norm(h + sublayer(h))`, or `h + sublayer(norm(h))` in pre-norm models, for hidden states `h` `[B, T, E]`.

        Keywords are those of `sublayer`; if it is attention, its maps are dropped.
        """
        update = sublayer(norm(hidden_states) if self.normalize_before else hidden_states, **kwargs)
        hidden_states = hidden_states + self.dropout(update[0] if isinstance(update, tuple) else update)
        return hidden_states if self.normalize_before else norm(hidden_states)


class DCBartEncoderLayer(DCBartLayer):
    """Bidirectional self-attention, then the MLP."""

    def __init__(self, config: DCBartConfig, layer_idx: int) -> None:
        super().__init__(config)
        self.self_attn = ComposedAttention(config, layer_idx, is_causal=False, composes=config.composes_in("encoder"))

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Maps hidden states `[B, S, E]` to hidden states `[B, S, E]`; keywords are those of `ComposedAttention`."""
        hidden_states = self.add(hidden_states, self.self_attn_layer_norm, self.self_attn, **kwargs)
        return self.add(hidden_states, self.mlp_layer_norm, self.mlp)


class DCBartDecoderLayer(DCBartLayer):
    """Causal self-attention, attention to the source, then the MLP."""

    def __init__(self, config: DCBartConfig, layer_idx: int) -> None:
        super().__init__(config)
        self.self_attn = ComposedAttention(config, layer_idx, composes=config.composes_in("decoder"))
        self.cross_attn = ComposedAttention(
            config, layer_idx, is_cross_attention=True, composes=config.composes_in("cross")
        )
        self.cross_attn_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    @takes_either_name
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Maps hidden states `[B, T, E]`, with those of the encoder `[B, S, E]`, to hidden states `[B, T, E]`."""
        kwargs["past_key_values"] = past_key_values
        hidden_states = self.add(
            hidden_states, self.self_attn_layer_norm, self.self_attn, attention_mask=attention_mask, **kwargs
        )
        kwargs |= {"key_value_states": encoder_hidden_states, "attention_mask": encoder_attention_mask}
        hidden_states = self.add(hidden_states, self.cross_attn_layer_norm, self.cross_attn, **kwargs)
        return self.add(hidden_states, self.mlp_layer_norm, self.mlp)


class DCBartPreTrainedModel(ComposedPreTrainedModel):
    """What all DCBart models share."""

    config: DCBartConfig
    _no_split_modules = ["DCBartEncoderLayer", "DCBartDecoderLayer"]


class DCBartStack(DCBartPreTrainedModel):
    """What encoder and decoder share: embeddings, positions and the last norm."""

    embed_tokens: nn.Module
    norm: nn.Module

    def __init__(self, config: DCBartConfig, layers: list[nn.Module]) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embed_tokens = make_embedding(config)
        self.embed_positions: nn.Module = SinusoidalTable(config.max_position_embeddings, width)
        if config.position_embedding_type == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings + config.position_offset, width)
        self.embed_norm = nn.LayerNorm(width, eps=config.layer_norm_eps) if config.normalize_embedding else None
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps) if config.normalize_before else nn.Identity()
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.gradient_checkpointing = False
        self.post_init()

    def add_positions(self, inputs_embeds: Tensor, position_ids: Tensor) -> Tensor:
        """The first layer's hidden states `[B, T, E]`, from embeddings `[B, T, E]` at positions `[.., T]`."""
        positions = self.embed_positions(position_ids + self.config.position_offset)
        hidden_states = inputs_embeds + positions.to(inputs_embeds.dtype)
        return self.dropout(hidden_states if self.embed_norm is None else self.embed_norm(hidden_states))


class DCBartEncoder(SourceEncoderBody, DCBartStack):
    """The encoder: every token sees all tokens of the source."""

    _can_record_outputs = {"hidden_states": DCBartEncoderLayer, "attentions": ComposedAttention}

    def __init__(self, config: DCBartConfig) -> None:
        super().__init__(config, [DCBartEncoderLayer(config, layer) for layer in range(config.num_hidden_layers)])


class DCBartDecoder(Seq2SeqDecoderBody, DCBartStack):
    """The decoder: a token sees itself, earlier tokens, and the source."""

    _can_record_outputs = {
        "hidden_states": DCBartDecoderLayer,
        "attentions": OutputRecorder(ComposedAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(ComposedAttention, index=1, layer_name="cross_attn"),
    }

    def __init__(self, config: DCBartConfig) -> None:
        super().__init__(config, [DCBartDecoderLayer(config, layer) for layer in range(config.decoder_layers or 0)])

    def prepare_cache(self, cache: EncoderDecoderCache) -> None:
        """Makes the caches also keep composition factors, where there are any that the key token generates."""
        parts = {"self_attn": cache.self_attention_cache, "cross_attn": cache.cross_attention_cache}
        for name, part in parts.items():
            if any(getattr(layer, name).composes_keys for layer in self.layers):
                upgrade_to_composed_cache(part)


class DCBartModel(Seq2SeqBody, DCBartPreTrainedModel):
    """Encoder and decoder without a head."""

    def __init__(self, config: DCBartConfig) -> None:
        super().__init__(config)
        self.shared = make_embedding(config)
        self.encoder, self.decoder = DCBartEncoder(config), DCBartDecoder(config)
        self.post_init()


class DCBartForConditionalGeneration(Seq2SeqLMHead, DCBartPreTrainedModel, GenerationMixin):
    """Encoder and decoder with a language modeling head: translation, summarization, denoising."""

    base_class = DCBartModel


class ScaledEmbedding(nn.Embedding):
    """Token embeddings times a constant."""

    def __init__(self, num_embeddings: int, hidden_size: int, padding_idx: int | None, scale: float) -> None:
        super().__init__(num_embeddings, hidden_size, padding_idx)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        """Returns `[B, T, E]` for tokens `[B, T]`."""
        return super().forward(input) * self.scale


def make_embedding(config: DCBartConfig) -> ScaledEmbedding:
    """The token embedding, scaled if configured, whose row of the padding token gets no gradient.

    Raises:
        ValueError: it lacks a special token of the configuration.
    """
    check_special_tokens(config, "pad_token_id", "decoder_start_token_id", "forced_eos_token_id")
    scale = math.sqrt(config.hidden_size) if config.scale_embedding else 1.0
    return ScaledEmbedding(config.vocab_size, config.hidden_size, config.pad_token_id, scale)


__all__ = ["DCBartForConditionalGeneration", "DCBartModel", "DCBartPreTrainedModel"]
