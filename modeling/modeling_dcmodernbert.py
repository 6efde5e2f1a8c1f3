"""DCModernBert: a bidirectional encoder whose attention heads are dynamically composed (arXiv 2405.08553)."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from ..configuration.configuration_dcmodernbert import DCModernBertConfig
from .common.composed_model import ComposedPreTrainedModel
from .common.encoder import EncoderBody
from .common.encoder_heads import (
    EncoderTokenClassificationHead,
    MaskedLMHead,
    MultipleChoiceHead,
    PooledClassificationHead,
    QuestionAnsweringHead,
)
from .common.input_checks import check_special_tokens
from .layers.composed_attention import ComposedAttention
from .layers.mlp import GatedMLP
from .positions.rotary import rotary_with


class DCModernBertLayer(GradientCheckpointingLayer):
    """Pre-norm attention, then pre-norm MLP, each with a residual.

    The first layer has no norm before its attention, because the embeddings are normalized already.
    """

    def __init__(self, config: DCModernBertConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = ComposedAttention(config, layer_idx, is_causal=False)
        self.mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            bias=config.mlp_bias,
            dropout=config.mlp_dropout,
        )
        self.input_layernorm = make_norm(config) if layer_idx > 0 else nn.Identity()
        self.post_attention_layernorm = make_norm(config)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Maps hidden states `[B, T, E]` to hidden states `[B, T, E]`."""
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), attention_mask=attention_mask, **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DCModernBertPreTrainedModel(ComposedPreTrainedModel):
    """What all DCModernBert models share."""

    config: DCModernBertConfig
    _no_split_modules = ["DCModernBertLayer"]
    _can_record_outputs = {"hidden_states": DCModernBertLayer, "attentions": ComposedAttention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draws truncated normal weights, as in ModernBERT."""
        super()._init_weights(module)
        if isinstance(module, nn.Linear | nn.Embedding) and (std := self._initial_std(module)):
            cut = self.config.initializer_cutoff_factor * std
            init.trunc_normal_(module.weight, std=std, a=-cut, b=cut)

    def _initial_std(self, module: nn.Module) -> float:
        """Standard deviation of initial weights, as in ModernBERT.

        A classifier has one by its width. Projections onto the residual stream, the prediction head and the language
        modeling head have a smaller one than the other modules.
        """
        if module is getattr(self, "classifier", None):
            return self.config.hidden_size**-0.5
        layers: Any = getattr(self, "model", self).layers
        outputs = {id(part) for layer in layers for part in (layer.self_attn.o_proj, layer.mlp.down_proj)}
        head = getattr(self, "prediction_head", None)
        outputs |= {id(getattr(head, "dense", None)), id(getattr(self, "lm_head", None))}
        if id(module) in outputs:
            return self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers)
        return self.config.initializer_range


class DCModernBertModel(EncoderBody, DCModernBertPreTrainedModel):
    """The encoder without a head."""

    def __init__(self, config: DCModernBertConfig) -> None:
        super().__init__(config)
        check_special_tokens(config, "pad_token_id")
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.embed_norm, self.dropout = make_norm(config), nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList([DCModernBertLayer(config, layer) for layer in range(config.num_hidden_layers)])
        self.norm = make_norm(config)
        layer_types, ropes = sorted(set(config.layer_types or ())), config.rope_parameters or {}
        self.rotary_emb = nn.ModuleDict({name: rotary_with(config, ropes[name]) for name in layer_types})
        self.gradient_checkpointing = False
        self.post_init()

    def embed(self, inputs_embeds: Tensor, position_ids: Tensor | None, attention_mask: Any = None) -> Tensor:
        """Normalizes embeddings `[B, T, E]`; positions act in the layers."""
        return self.dropout(self.embed_norm(inputs_embeds))

    def rotations(self, hidden_states: Tensor, position_ids: Tensor | None) -> dict[str, tuple[Tensor, Tensor]]:
        """Rotary cosines and sines `[B, T, rotary_dim]` for each layer type; positions count from 0 by default."""
        if position_ids is None:
            position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
        return {layer_type: rotary(hidden_states, position_ids) for layer_type, rotary in self.rotary_emb.items()}


class DCModernBertForMaskedLM(MaskedLMHead, DCModernBertPreTrainedModel):
    """The encoder with a masked language modeling head."""

    base_class = DCModernBertModel


class DCModernBertForSequenceClassification(PooledClassificationHead, DCModernBertPreTrainedModel):
    """The encoder with a classifier of whole sequences."""

    base_class = DCModernBertModel


class DCModernBertForMultipleChoice(MultipleChoiceHead, DCModernBertPreTrainedModel):
    """The encoder with a score for each of several texts."""

    base_class = DCModernBertModel


class DCModernBertForTokenClassification(EncoderTokenClassificationHead, DCModernBertPreTrainedModel):
    """The encoder with a classifier of every token."""

    base_class = DCModernBertModel


class DCModernBertForQuestionAnswering(QuestionAnsweringHead, DCModernBertPreTrainedModel):
    """The encoder with scores of each token for the ends of an answer."""

    base_class = DCModernBertModel


def make_norm(config: DCModernBertConfig) -> nn.LayerNorm:
    """The kind of norm that all parts of the model have."""
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)


__all__ = [
    "DCModernBertForMaskedLM",
    "DCModernBertForMultipleChoice",
    "DCModernBertForQuestionAnswering",
    "DCModernBertForSequenceClassification",
    "DCModernBertForTokenClassification",
    "DCModernBertModel",
    "DCModernBertPreTrainedModel",
]
