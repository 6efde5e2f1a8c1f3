"""DCFormer: a LLaMA-style decoder whose attention heads are dynamically composed (arXiv 2405.08553)."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer

from ..configuration.configuration_dcformer import DCFormerConfig
from .caches.names import takes_either_name
from .common.composed_decoder import ComposedDecoderBody, ComposedDecoderPreTrainedModel
from .common.decoder_heads import (
    CausalLMHead,
    DecoderQuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from .layers.composed_attention import ComposedAttention
from .layers.mlp import GatedMLP
from .layers.rms_norm import RMSNorm
from .ops.dtypes import at_least_float32


class DCFormerMLP(GatedMLP):
    """SwiGLU. With `mgate_dim`, a softmax computed from the token scales each group of its activations."""

    def __init__(self, config: DCFormerConfig) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, config.hidden_act, bias=config.mlp_bias)
        self.mgate = nn.Linear(config.hidden_size, config.mgate_dim, bias=False) if config.mgate_dim else None

    def activations(self, hidden_states: Tensor) -> Tensor:
        """As the base, with groups of activations `[B, T, intermediate_size]` scaled."""
        activations = super().activations(hidden_states)
        if self.mgate is None:
            return activations
        logits = self.mgate(hidden_states)  # [B, T, mgate_dim]
        gates = torch.softmax(logits, dim=-1, dtype=at_least_float32(logits.dtype))
        gates = gates.to(activations.dtype)[..., None]
        return (activations.unflatten(-1, (gates.shape[-2], -1)) * gates).flatten(-2)


class DCFormerDecoderLayer(GradientCheckpointingLayer):
    """Attention, then MLP, each with a residual and a norm, of its input or its output.

    Norms are named as in Transformers' Llama and OLMo 2, where `post_attention_layernorm` is the norm of the MLP's
    input in one and of the attention's output in the other.
    """

    def __init__(self, config: DCFormerConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = ComposedAttention(config, layer_idx)
        self.mlp = DCFormerMLP(config)
        make_norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps)
        # Trainer and the first version's checkpoints number weights in the order in which layers have them.
        self.input_layernorm = make_norm() if config.norm_placement == "input" else None
        self.post_attention_layernorm = make_norm()
        self.post_feedforward_layernorm = make_norm() if config.norm_placement == "output" else None

    @takes_either_name
    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Maps hidden states `[B, T, E]` to hidden states `[B, T, E]`; other arguments are those of the attention."""
        normalized = hidden_states if self.input_layernorm is None else self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(normalized, attention_mask=attention_mask, **kwargs)
        if self.post_feedforward_layernorm is None:
            hidden_states = hidden_states + attended
            return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        hidden_states = hidden_states + self.post_attention_layernorm(attended)
        return hidden_states + self.post_feedforward_layernorm(self.mlp(hidden_states))


class DCFormerPreTrainedModel(ComposedDecoderPreTrainedModel):
    """What all DCFormer models share."""

    config: DCFormerConfig
    _no_split_modules = ["DCFormerDecoderLayer"]
    _can_record_outputs = {"hidden_states": DCFormerDecoderLayer, "attentions": ComposedAttention}


class DCFormerModel(ComposedDecoderBody, DCFormerPreTrainedModel):
    """The decoder without a head."""

    def __init__(self, config: DCFormerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([DCFormerDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.make_positions()
        self.gradient_checkpointing = False
        self.post_init()


class DCFormerForCausalLM(CausalLMHead, DCFormerPreTrainedModel, GenerationMixin):
    """The decoder with a language modeling head."""

    base_class = DCFormerModel


class DCFormerForSequenceClassification(SequenceClassificationHead, DCFormerPreTrainedModel):
    """The decoder with a classifier on the last real token."""

    base_class = DCFormerModel


class DCFormerForTokenClassification(TokenClassificationHead, DCFormerPreTrainedModel):
    """The decoder with a classifier on every token."""

    base_class = DCFormerModel


class DCFormerForQuestionAnswering(DecoderQuestionAnsweringHead, DCFormerPreTrainedModel):
    """The decoder with scores of each token for the ends of an answer."""

    base_class = DCFormerModel


__all__ = [
    "DCFormerForCausalLM",
    "DCFormerForQuestionAnswering",
    "DCFormerForSequenceClassification",
    "DCFormerForTokenClassification",
    "DCFormerModel",
    "DCFormerPreTrainedModel",
]
