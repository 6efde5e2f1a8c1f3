"""RCMHA: a Transformer-XL-style decoder with relative convolutional attention (arXiv 2308.03429), and its baselines."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..configuration.configuration_rcmha import RCMHAConfig
from .caches.segment import Segment, describe_segment
from .caches.segment_memory import SegmentMemoryLayer, carry_memory
from .common.decoder_inputs import prepare_decoder_inputs
from .common.heads import CausalLMHead, SequenceClassificationHead, TokenClassificationHead
from .layers.attention_interface import implementation_for
from .layers.headwise_conv import HeadwiseCausalConv, init_conv
from .layers.relative_attention import RCMHAAttention
from .ops.relative.attention import resolve_relative
from .positions.rotary import RotaryEmbedding


class RCMHAMLP(nn.Module):
    """Two projections with an activation between them."""

    def __init__(self, config: RCMHAConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(hidden_states)))


class RCMHADecoderLayer(GradientCheckpointingLayer):
    """Attention, then MLP, each on a normed input; memory is normed like the segment."""

    def __init__(self, config: RCMHAConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.self_attn = RCMHAAttention(config, layer_idx)
        self.mlp = RCMHAMLP(config)
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden_states: Tensor,
        segment: Segment,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Maps hidden states `[B, T, E]` to hidden states `[B, T, E]`."""
        context = hidden_states
        memory = past_key_values.layers[self.layer_idx] if past_key_values is not None else None
        if isinstance(memory, SegmentMemoryLayer):
            context = memory.extend(hidden_states)
        attended, _ = self.self_attn(
            self.input_layernorm(context),
            segment=segment,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        hidden_states = hidden_states + self.dropout(attended)
        return hidden_states + self.dropout(self.mlp(self.post_attention_layernorm(hidden_states)))


class RCMHAPreTrainedModel(PreTrainedModel):
    """Flags for Transformers, initial weights, and the choice of the attention implementation."""

    config: RCMHAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["RCMHADecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _can_compile_fullgraph = True
    # Context parallelism splits the keys, which the relative positions and the convolutions of a token run across.
    _supports_context_parallel = False
    _can_record_outputs = {"hidden_states": RCMHADecoderLayer, "attentions": RCMHAAttention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, HeadwiseCausalConv):
            init_conv(module, std)
        elif isinstance(module, RCMHAAttention) and module.position_embeddings is not None:
            for table in (module.position_embeddings, module.position_bias, module.content_bias):
                init.normal_(table, std=std)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        """Only the ops of this family know its position terms; the fastest is the default."""
        relative = self.config.is_relative or self.config.position_scheme == "alibi"
        return resolve_relative(attn_implementation, relative=relative)


class RCMHAModel(RCMHAPreTrainedModel):
    """The decoder without a head."""

    def __init__(self, config: RCMHAConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = (
            nn.Embedding(config.max_position_embeddings, config.hidden_size)
            if config.position_scheme == "learned"
            else None
        )
        self.layers = nn.ModuleList([RCMHADecoderLayer(config, layer) for layer in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.rotary_emb = RotaryEmbedding(config) if config.position_scheme == "rope" else None
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Returns hidden states `[B, T, E]` of a segment, and the memory for the next one.

        The arguments are those of `prepare_decoder_inputs`. Any dynamic or static cache carries the memory, in training
        too: what it holds is detached.

        Raises:
            ValueError: the arguments do not fit each other, or the segment does not fit the positions.
        """
        if past_key_values is not None and self.gradient_checkpointing and self.training:
            raise ValueError(
                "memory cannot be carried through gradient checkpointing, which drops caches; switch "
                "checkpointing off, or train without past_key_values"
            )
        given = attention_mask, past_key_values
        packed = position_ids is not None or kwargs.get("cu_seq_lens_q") is not None
        if attention_mask is None and not (packed and past_key_values is None):
            # The ops know causality, window and memory themselves; a mask would only repeat them.
            attention_mask = {self.config.layer_types[0]: None}
        if past_key_values is not None:
            carry_memory(past_key_values, self.config)
        hidden_states, position_ids, past_key_values, masks, _ = prepare_decoder_inputs(
            self.config,
            self.embed_tokens,
            input_ids,
            inputs_embeds,
            attention_mask,
            position_ids,
            past_key_values,
            use_cache,
            kwargs.get("cu_seq_lens_q"),
        )
        if past_key_values is not None:
            carry_memory(past_key_values, self.config)
        mask = masks[self.config.layer_types[0]]
        segment = describe_segment(
            self.config, hidden_states, position_ids, past_key_values, mask, given, packed, self.rotary_emb
        )
        if self.embed_positions is not None:
            hidden_states = hidden_states + self.embed_positions(position_ids)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                segment=segment,
                attention_mask=mask,
                past_key_values=past_key_values,
                use_cache=use_cache,
                implementation=implementation_for(self.config, kwargs),
                **kwargs,
            )
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values if use_cache else None
        )


class RCMHAForCausalLM(CausalLMHead, RCMHAPreTrainedModel, GenerationMixin):
    """The decoder with a language modeling head."""

    base_class = RCMHAModel


class RCMHAForSequenceClassification(SequenceClassificationHead, RCMHAPreTrainedModel):
    """The decoder with a classifier on the last real token."""

    base_class = RCMHAModel


class RCMHAForTokenClassification(TokenClassificationHead, RCMHAPreTrainedModel):
    """The decoder with a classifier on every token."""

    base_class = RCMHAModel


__all__ = [
    "RCMHAForCausalLM",
    "RCMHAForSequenceClassification",
    "RCMHAForTokenClassification",
    "RCMHAModel",
    "RCMHAPreTrainedModel",
]
