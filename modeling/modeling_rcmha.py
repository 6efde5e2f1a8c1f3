"""RCMHA: a Transformer-XL-style decoder with relative convolutional attention (arXiv 2308.03429), and its baselines."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache

from ..configuration.configuration_rcmha import RCMHAConfig
from .caches.key_places import key_count
from .caches.memory_cache import upgrade_to_memory_cache
from .caches.names import takes_either_name
from .caches.segment_memory import SegmentMemoryLayer
from .common.activation_checkpointing import drops_caches
from .common.decoder import DecoderBody
from .common.decoder_heads import (
    CausalLMHead,
    DecoderQuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from .common.decoder_inputs import DecoderArguments, DecoderInputs
from .common.relative_model import RelativeLayer, RelativePreTrainedModel
from .layers.relative_attention import RCMHAAttention
from .layers.segment import Segment, describe_segment
from .positions.absolute import make_absolute
from .positions.alibi import alibi_bias
from .positions.learned_tables import learned_bias
from .positions.rotary import RotaryEmbedding


class RCMHADecoderLayer(RelativeLayer):
    """Pre-norm attention, then pre-norm MLP, each with a residual.

    Segment memory holds hidden states before the norm, which is applied to memory and segment together.
    """

    def __init__(self, config: RCMHAConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.layer_idx = layer_idx

    @takes_either_name
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


class RCMHAPreTrainedModel(RelativePreTrainedModel):
    """What all RCMHA models share."""

    config: RCMHAConfig
    _no_split_modules = ["RCMHADecoderLayer"]
    _can_record_outputs = {"hidden_states": RCMHADecoderLayer, "attentions": RCMHAAttention}
    # Serving engines ask these: layers need more of earlier tokens than their keys and values.
    supports_paged_cache = attends_to_paged_cache = False


class RCMHAModel(DecoderBody, RCMHAPreTrainedModel):
    """The decoder without a head. A call reads one segment of tokens, and the memory of earlier ones from the cache.

    Any dynamic or static cache can carry the memory, also in training: what it holds is detached from the graph.
    """

    def __init__(self, config: RCMHAConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = make_absolute(config)
        self.layers = nn.ModuleList([RCMHADecoderLayer(config, layer) for layer in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.rotary_emb = RotaryEmbedding(config) if config.position_scheme == "rope" else None
        self.position_bias = learned_bias(config)
        self.gradient_checkpointing = False
        self.post_init()

    def prepare_inputs(self, given: DecoderArguments) -> DecoderInputs:
        """As the base; refuses to train with memory and gradient checkpointing, which drops caches."""
        if given.past_key_values is not None and drops_caches(self):
            raise ValueError(
                "memory cannot be carried through gradient checkpointing, which drops caches; switch "
                "checkpointing off, or train without past_key_values"
            )
        return super().prepare_inputs(given)

    def make_masks(
        self, given: DecoderArguments, inputs_embeds: Tensor, starts: Tensor | None
    ) -> dict[str, Tensor | None]:
        """As the base, but without padding and packed documents there are no masks.

        The ops apply causality, window and the reach into memory by themselves.
        """
        if given.attention_mask is None and starts is None:
            return dict.fromkeys(self.config.layer_types)
        return super().make_masks(given, inputs_embeds, starts)

    def prepare_cache(self, cache: Cache) -> None:
        """Makes `cache`, in place, keep the memory of the configured `memory_type`."""
        upgrade_to_memory_cache(cache, self.config)

    def layer_inputs(self, given: DecoderArguments, inputs: DecoderInputs) -> tuple[Tensor, dict[str, dict[str, Any]]]:
        """The embeddings `[B, T, E]`, with absolute positions added if the model has any, and the layers' `Segment`."""
        config, cache, embeddings = self.config, inputs.past_key_values, inputs.inputs_embeds
        segment = describe_segment(
            config,
            embeddings,
            cache,
            inputs.masks[config.layer_types[0]],
            given_mask=given.attention_mask,
            document_starts=inputs.document_starts,
        )
        keys = key_count(cache, 0, segment.length)
        segment = segment._replace(
            rotary=self.rotations(inputs, keys), scheme_bias=self.scheme_bias(keys, embeddings.device)
        )
        return self.embed(inputs), {layer_type: {"segment": segment} for layer_type in config.layer_types}

    def rotations(self, inputs: DecoderInputs, keys: int) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines `[B, N, D]` of all `N` tokens that layers project (see `Segment`); None without `"rope"`.

        With segment memory these are all `keys`, which are turned by their places among them.
        """
        if self.rotary_emb is None:
            return None
        embeddings, position_ids = inputs.inputs_embeds, inputs.position_ids
        if self.config.memory_type == "segment" and keys != embeddings.shape[1]:
            position_ids = torch.arange(keys, device=embeddings.device)[None]
        return self.rotary_emb(embeddings, position_ids)

    def scheme_bias(self, keys: int, device: torch.device) -> Tensor | None:
        """The bias `[S, H]` of the position scheme for distances to `S` keys, at least float32; None if it has none."""
        if self.position_bias is not None:
            return self.position_bias(keys)
        heads = self.config.num_attention_heads
        return alibi_bias(keys, heads, device) if self.config.position_scheme == "alibi" else None


class RCMHAForCausalLM(CausalLMHead, RCMHAPreTrainedModel, GenerationMixin):
    """The decoder with a language modeling head."""

    base_class = RCMHAModel


class RCMHAForSequenceClassification(SequenceClassificationHead, RCMHAPreTrainedModel):
    """The decoder with a classifier on the last real token."""

    base_class = RCMHAModel


class RCMHAForTokenClassification(TokenClassificationHead, RCMHAPreTrainedModel):
    """The decoder with a classifier on every token."""

    base_class = RCMHAModel


class RCMHAForQuestionAnswering(DecoderQuestionAnsweringHead, RCMHAPreTrainedModel):
    """The decoder with scores of each token for the ends of an answer."""

    base_class = RCMHAModel


__all__ = [
    "RCMHAForCausalLM",
    "RCMHAForQuestionAnswering",
    "RCMHAForSequenceClassification",
    "RCMHAForTokenClassification",
    "RCMHAModel",
    "RCMHAPreTrainedModel",
]
