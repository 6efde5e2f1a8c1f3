"""DCPythia: a GPT-NeoX-style decoder whose attention heads are dynamically composed (arXiv 2405.08553)."""

from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer

from ..configuration.configuration_dcpythia import DCPythiaConfig
from .caches.names import takes_either_name
from .common.composed_decoder import ComposedDecoderBody, ComposedDecoderPreTrainedModel
from .common.decoder_heads import (
    CausalLMHead,
    DecoderQuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from .layers.composed_attention import ComposedAttention
from .layers.mlp import MLP


class DCPythiaDecoderLayer(GradientCheckpointingLayer):
    """Attention and MLP, side by side (parallel residual) or one after the other."""

    def __init__(self, config: DCPythiaConfig, layer_idx: int) -> None:
        super().__init__()
        self.use_parallel_residual = config.use_parallel_residual
        self.self_attn = ComposedAttention(config, layer_idx)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.hidden_act, bias=config.mlp_bias)
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    @takes_either_name
    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Maps hidden states `[B, T, E]` to hidden states `[B, T, E]`; other arguments are those of the attention."""
        normalized = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(normalized, attention_mask=attention_mask, **kwargs)
        if self.use_parallel_residual:
            return self.mlp(self.post_attention_layernorm(hidden_states)) + attended + hidden_states
        hidden_states = hidden_states + attended
        return self.mlp(self.post_attention_layernorm(hidden_states)) + hidden_states


class DCPythiaPreTrainedModel(ComposedDecoderPreTrainedModel):
    """What all DCPythia models share."""

    config: DCPythiaConfig
    _no_split_modules = ["DCPythiaDecoderLayer"]
    _can_record_outputs = {"hidden_states": DCPythiaDecoderLayer, "attentions": ComposedAttention}


class DCPythiaModel(ComposedDecoderBody, DCPythiaPreTrainedModel):
    """The decoder without a head."""

    def __init__(self, config: DCPythiaConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([DCPythiaDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.make_positions()
        self.gradient_checkpointing = False
        self.post_init()


class DCPythiaForCausalLM(CausalLMHead, DCPythiaPreTrainedModel, GenerationMixin):
    """The decoder with a language modeling head."""

    base_class = DCPythiaModel


class DCPythiaForSequenceClassification(SequenceClassificationHead, DCPythiaPreTrainedModel):
    """The decoder with a classifier on the last real token."""

    base_class = DCPythiaModel


class DCPythiaForTokenClassification(TokenClassificationHead, DCPythiaPreTrainedModel):
    """The decoder with a classifier on every token."""

    base_class = DCPythiaModel


class DCPythiaForQuestionAnswering(DecoderQuestionAnsweringHead, DCPythiaPreTrainedModel):
    """The decoder with scores of each token for the ends of an answer."""

    base_class = DCPythiaModel


__all__ = [
    "DCPythiaForCausalLM",
    "DCPythiaForQuestionAnswering",
    "DCPythiaForSequenceClassification",
    "DCPythiaForTokenClassification",
    "DCPythiaModel",
    "DCPythiaPreTrainedModel",
]
