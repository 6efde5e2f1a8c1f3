"""DCFormer: a LLaMA-style decoder whose attention heads are dynamically composed (arXiv 2405.08553)."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, slice_logits_to_keep
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..configuration.configuration_dcformer import DCFormerConfig
from .composed_cache import keep_factors
from .composition import DynamicComposition, init_composition, rms_normalize
from .inputs import check_attention_mask, check_labels, check_tokens
from .ops.dcmha import resolve_implementation
from .ops.dcmha_eager import dcmha_eager


class DCFormerRMSNorm(nn.Module):
    """Root mean square norm with a learned scale, over the last dimension; statistics in at least float32."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.weight * rms_normalize(hidden_states, self.eps)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class DCFormerRotaryEmbedding(nn.Module):
    """Cosines and sines of the rotary position embedding, `[B, T, D]` each, in every variant Transformers knows."""

    inv_freq: Tensor

    def __init__(self, config: DCFormerConfig) -> None:
        super().__init__()
        self.config = config
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = config.rope_parameters["rope_type"]  # type: ignore[index]
        init_fn = self.compute_default_rope_parameters
        if self.rope_type != "default":
            init_fn = ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, self.attention_scaling = init_fn(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config: DCFormerConfig, **_: Any) -> tuple[Tensor, float]:
        """Returns the inverse frequencies `[D / 2]` and the factor on cosines and sines (Transformers' contract)."""
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float) / config.head_dim
        return 1.0 / config.rope_parameters["rope_theta"] ** exponent, 1.0  # type: ignore[index]

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        angles = torch.cat((angles, angles), dim=-1)  # [B, T, D]
        return (
            (angles.cos() * self.attention_scaling).to(x.dtype),
            (angles.sin() * self.attention_scaling).to(x.dtype),
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (i, i + D/2) of `x` `[B, H, T, D]` by the angles of `cos` and `sin` `[B, T, D]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)


class DCFormerMLP(nn.Module):
    """SwiGLU; with `mgate_dim`, groups of activations are scaled by a softmax over groups."""

    def __init__(self, config: DCFormerConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)
        self.mgate = nn.Linear(hidden, config.mgate_dim, bias=False) if config.mgate_dim else None
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        activations = self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states)
        if self.mgate is not None:
            logits = self.mgate(hidden_states)
            dtype = torch.promote_types(logits.dtype, torch.float32)
            gates = torch.softmax(logits, dim=-1, dtype=dtype).to(activations.dtype)
            activations = (activations.unflatten(-1, (gates.shape[-1], -1)) * gates[..., None]).flatten(-2)
        return self.down_proj(activations)


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The reference op behind Transformers' attention interface, whose masks are complete when they are given."""
    complete = attention_mask is not None
    return dcmha_eager(
        query,
        key,
        value,
        pre=kwargs.get("pre"),
        post=kwargs.get("post"),
        scaling=scaling,
        attention_mask=attention_mask,
        is_causal=not complete,
        sliding_window=None if complete else sliding_window,
    )


class DCFormerAttention(nn.Module):
    """Dynamically composable multi-head attention: projections, factors, cache, op."""

    def __init__(self, config: DCFormerConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim: int = config.head_dim  # type: ignore[assignment]
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        sliding = config.layer_types[layer_idx] == "sliding_attention"  # type: ignore[index]
        self.sliding_window = config.sliding_window if sliding else None
        query_size = config.num_attention_heads * self.head_dim
        key_size = config.num_key_value_heads * self.head_dim  # type: ignore[operator]
        self.num_key_value_groups = query_size // key_size
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = DCFormerRMSNorm(self.head_dim, config.qk_norm_eps) if config.use_qk_norm else None
        self.k_norm = DCFormerRMSNorm(self.head_dim, config.qk_norm_eps) if config.use_qk_norm else None
        self.composition = DynamicComposition(config) if config.composes else None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output `[B, T, E]` and, from `eager`, the composed probabilities `[B, H, T, S]`."""
        query, key, value = self._project(hidden_states, position_embeddings)
        factors = self.composition(hidden_states) if self.composition is not None else {}
        if past_key_values is not None and "key" in factors:
            key, (value, factors["key"]) = past_key_values.update(key, value, self.layer_idx, factors["key"])
        elif past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        composition = {}
        if self.composition is not None:
            composition["pre"], composition["post"] = self.composition.assemble(factors)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **composition,
            **kwargs,
        )
        return self.o_proj(output.flatten(2)), weights

    def _project(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[B, H, T, D]`, keys and values `[B, H_kv, T, D]`; queries and keys are normed, then rotated."""
        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        cos, sin = position_embeddings
        return rotate(query.transpose(1, 2), cos, sin), rotate(key.transpose(1, 2), cos, sin), value.transpose(1, 2)


class DCFormerDecoderLayer(GradientCheckpointingLayer):
    """Pre-norm attention, then pre-norm MLP, each with a residual."""

    def __init__(self, config: DCFormerConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = DCFormerAttention(config, layer_idx)
        self.mlp = DCFormerMLP(config)
        self.input_layernorm = DCFormerRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = DCFormerRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Tensor:
        """Maps hidden states `[B, T, E]` to hidden states `[B, T, E]`."""
        attended, _ = self.self_attn(
            self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DCFormerPreTrainedModel(PreTrainedModel):
    """What all DCFormer models share: flags for Transformers, initial weights, the choice of attention."""

    config: DCFormerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["DCFormerDecoderLayer"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    # Context parallelism drops the mask and splits the keys; neither is possible while heads are composed.
    _supports_context_parallel = False
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "hidden_states": DCFormerDecoderLayer,
        "attentions": DCFormerAttention,
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DynamicComposition):
            init_composition(module, self.config.compose_init_scale)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        """Without composition the default, and a possible choice, is SDPA; with it, what `resolve_implementation` says."""
        if attn_implementation in (None, "sdpa"):
            return resolve_implementation(attn_implementation, composed=self.config.composes)
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)


class DCFormerModel(DCFormerPreTrainedModel):
    """The decoder without a head."""

    def __init__(self, config: DCFormerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([DCFormerDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)])
        self.norm = DCFormerRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = DCFormerRotaryEmbedding(config)
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
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """
        Args:
            input_ids: `[B, T]` token ids; or give `inputs_embeds` `[B, T, E]`.
            attention_mask: `[B, S]`, 1 for real tokens and 0 for padding on either side; or `[B, 1, T, S]`, or one such
                mask for each layer type.
            position_ids: `[B, T]`. Restarting at 0 packs documents that do not see each other, given neither
                `attention_mask` nor a cache.
            past_key_values: any dynamic or static cache; it will keep composition factors beside keys and values.

        Raises:
            ValueError: shapes that do not fit, or a row of the batch that is all padding.
        """
        check_tokens(input_ids, inputs_embeds)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        check_attention_mask(attention_mask, inputs_embeds, past_key_values)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if past_key_values is not None and self.config.composes_keys:
            keep_factors(past_key_values)
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + seen).unsqueeze(0)

        masks = self._masks_by_layer_type(attention_mask, inputs_embeds, past_key_values, position_ids)
        position_embeddings = self.rotary_emb(inputs_embeds, position_ids)
        hidden_states = inputs_embeds
        for layer, layer_type in zip(self.layers, self.config.layer_types, strict=True):  # type: ignore[arg-type]
            hidden_states = layer(
                hidden_states,
                attention_mask=masks[layer_type],
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                **kwargs,
            )
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values if use_cache else None
        )

    def _masks_by_layer_type(
        self,
        attention_mask: Tensor | dict[str, Tensor | None] | None,
        inputs_embeds: Tensor,
        past_key_values: Cache | None,
        position_ids: Tensor,
    ) -> dict[str, Tensor | None]:
        """One mask for each layer type in use; `generate` may have prepared them already."""
        if isinstance(attention_mask, dict):
            return attention_mask
        makers = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
        return {
            layer_type: makers[layer_type](
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            )
            for layer_type in set(self.config.layer_types)  # type: ignore[arg-type]
        }


class DCFormerForCausalLM(DCFormerPreTrainedModel, GenerationMixin):
    """The decoder with a language modeling head."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    _pp_plan: ClassVar[dict[str, Any]] = {"lm_head": (["hidden_states"], ["logits"])}

    def __init__(self, config: DCFormerConfig) -> None:
        super().__init__(config)
        self.model = DCFormerModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """
        Args:
            labels: `[B, T]`, the same tokens as `input_ids` (the shift is done here), -100 where no loss is wanted.
                With `num_items_in_batch` the loss is the sum over targets divided by it, else the mean.
            logits_to_keep: 0 for the logits of all positions, `n` for the last `n`, or the positions' indices.

        The other arguments are those of `DCFormerModel.forward`. Logits are `[B, T, V]`.
        """
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            check_labels(labels, logits)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class DCFormerForSequenceClassification(GenericForSequenceClassification, DCFormerPreTrainedModel):
    """The decoder with a classifier on the last real token."""


class DCFormerForTokenClassification(GenericForTokenClassification, DCFormerPreTrainedModel):
    """The decoder with a classifier on every token."""


__all__ = [
    "DCFormerForCausalLM",
    "DCFormerForSequenceClassification",
    "DCFormerForTokenClassification",
    "DCFormerModel",
    "DCFormerPreTrainedModel",
]
