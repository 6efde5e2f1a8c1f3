"""What RCMHA's language models and encoder-decoders share around their layers."""

from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from ...configuration.field_rules import BIAS_SCHEMES
from ...configuration.relative_config import RelativeConfig
from ..layers.headwise_conv import HeadwiseConv, init_conv
from ..layers.mlp import MLP
from ..layers.relative_attention import RCMHAAttention
from ..ops.relative.attention import resolve_relative
from .family_model import FamilyPreTrainedModel


class RelativeLayer(GradientCheckpointingLayer):
    """The modules that the layers of decoders and encoders share: self-attention, the MLP and their norms."""

    def __init__(self, config: RelativeConfig, layer_idx: int, *, is_causal: bool = True) -> None:
        super().__init__()
        self.self_attn = RCMHAAttention(config, layer_idx, is_causal=is_causal)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)


class RelativePreTrainedModel(FamilyPreTrainedModel):
    """Draws initial weights and chooses the attention implementation."""

    config: RelativeConfig

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, HeadwiseConv):
            init_conv(module, std)
        elif isinstance(module, RCMHAAttention) and module.position_embeddings is not None:
            for table in (module.position_embeddings, module.position_bias, module.content_bias):
                init.normal_(table, std=std)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        """The attention implementation that the model runs with, from the one that the caller asked for.

        The model takes only the implementations of `relative_attention` (`eager`, `sdpa`, `chunked`), since no others
        compute its position terms. The default is `chunked` for a model whose scores depend on distances, else `sdpa`.

        Raises:
            ValueError: the implementation is none of these.
        """
        relative = self.config.is_relative or self.config.position_scheme in BIAS_SCHEMES
        return resolve_relative(attn_implementation, relative=relative)
