"""Relative convolutional attention (RCMHA, arXiv 2308.03429) and the paper's three baselines, as one layer."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface

from ...configuration.configuration_rcmha import RCMHAConfig
from ..caches.segment import Segment
from ..ops.relative.attention import RELATIVE
from ..positions.alibi import alibi_bias
from ..positions.rotary import rotate
from .attention_interface import chunked_mask
from .headwise_conv import HeadwiseConv

# Transformers looks masks up by the name of the implementation; it has its own for `eager` and `sdpa`.
AttentionMaskInterface.register("chunked", chunked_mask)


class RCMHAAttention(nn.Module):
    """Multi-head attention with the convolutions and position terms of the configured `attention_type`."""

    def __init__(self, config: RCMHAConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        heads, self.head_dim = config.num_attention_heads, config.head_dim or 0
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        size = heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, size, bias=bool(config.qk_bias))
        self.k_proj = nn.Linear(config.hidden_size, size, bias=bool(config.qk_bias))
        self.v_proj = nn.Linear(config.hidden_size, size)
        self.o_proj = nn.Linear(size, config.hidden_size)
        for name in ("q_conv", "k_conv", "v_conv"):
            conv = HeadwiseConv(self.head_dim, config.conv_kernel_size) if config.convolves else None
            self.register_module(name, conv)
        for name in ("position_embeddings", "position_bias", "content_bias"):
            self.register_parameter(name, None)
        if config.is_relative:
            rows = config.num_relative_positions
            self.position_embeddings = nn.Parameter(torch.empty(rows, heads, self.head_dim))
            self.position_bias = nn.Parameter(torch.empty(rows, heads))
            self.content_bias = nn.Parameter(torch.empty(heads, self.head_dim))

    def forward(
        self,
        hidden_states: Tensor,
        segment: Segment,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        implementation: str | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output `[B, T, E]` and, from `eager`, the probabilities `[B, H, T, S]`.

        Args:
            hidden_states: `[B, T, E]`; with segment memory `[B, M + T, E]`, whose last `T` tokens are the queries.
            attention_mask: `[B, 1, T, S]`, boolean or additive.
            implementation: of the attention op, by default the configuration's.
        """
        streaming = past_key_values if self.config.memory_type == "streaming" else None
        query = self._project("q", hidden_states[:, -segment.length :], segment, streaming)
        key = self._project("k", hidden_states, segment, streaming)
        value = self._project("v", hidden_states, segment, streaming)
        if segment.rotary is not None:
            cos, sin = segment.rotary
            query, key = rotate(query, cos[:, -segment.length :], sin[:, -segment.length :]), rotate(key, cos, sin)
        if streaming is not None:
            key, value = streaming.update(key, value, self.layer_idx)
        position_bias = self.position_bias
        if self.config.position_scheme == "alibi":
            position_bias = alibi_bias(key.shape[2], query) / self.scaling
        output, weights = RELATIVE[implementation or self.config._attn_implementation](
            query,
            key,
            value,
            position_embeddings=self.position_embeddings,
            position_bias=position_bias,
            content_bias=self.content_bias,
            scaling=self.scaling,
            attention_mask=attention_mask,
            is_causal=True,
            sliding_window=self.config.sliding_window,
            offset=segment.query_offset,
            dropout=self.config.attention_dropout if self.training else 0.0,
        )
        return self.o_proj(output.flatten(2)), weights

    def _project(self, name: str, hidden_states: Tensor, segment: Segment, streaming: Cache | None) -> Tensor:
        """Queries, keys or values `[B, H, T, D]`, projected and convolved, of hidden states `[B, T, E]`.

        Padding is set to zero before the convolution. `streaming` is the cache that holds its left context.
        """
        projection, conv = getattr(self, f"{name}_proj"), getattr(self, f"{name}_conv")
        projected = projection(hidden_states)
        if conv is None:
            return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if segment.token_mask is not None:
            projected = projected * segment.token_mask[:, -projected.shape[1] :, None]
        if streaming is not None:
            projected = streaming.layers[self.layer_idx].extend(name, projected)  # type: ignore[union-attr]
        else:
            projected = conv.pad(projected)
        projected = projected.unflatten(-1, (-1, self.head_dim))
        return conv(projected, segment.document_positions).transpose(1, 2)
