"""Relative convolutional attention (RCMHA, arXiv 2308.03429) and its paper's three baselines, as one layer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache

from ...configuration.relative_config import RelativeConfig
from ..caches.offloading import await_copies, read_layer, update_layer
from ..ops.dtypes import at_least_float32
from ..ops.relative.attention import RELATIVE_IMPLEMENTATIONS, Attention, resolve_relative
from ..ops.relative.eager import PositionTerms
from ..positions.rotary import rotate
from .headwise_conv import HeadwiseConv
from .segment import Segment


class ConvolvedHeads(nn.Module):
    """The projections of an attention layer and, for the attention types that convolve, convolutions after them."""

    is_causal: bool

    def __init__(self, config: RelativeConfig, layer_idx: int, *, qk_bias: bool, later: int, query_later: int) -> None:
        """Makes projections and convolutions.

        Args:
            qk_bias: whether the query and key projections have a bias; the others always have one.
            later: number of later tokens that the convolution of a key or a value reads.
            query_later: number of later tokens that the convolution of a query reads.
        """
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.head_dim or 0
        self.scaling = self.head_dim**-0.5
        size = config.num_attention_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, size, bias=qk_bias)
        self.k_proj = nn.Linear(config.hidden_size, size, bias=qk_bias)
        self.v_proj = nn.Linear(config.hidden_size, size)
        self.o_proj = nn.Linear(size, config.hidden_size)
        for name, ahead in {"q_conv": query_later, "k_conv": later, "v_conv": later}.items():
            conv = HeadwiseConv(self.head_dim, config.conv_kernel_size, ahead) if config.convolves else None
            self.register_module(name, conv)

    def project(
        self,
        name: str,
        hidden_states: Tensor,
        token_mask: Tensor | None = None,
        document_positions: Tensor | None = None,
        extend: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Queries, keys or values `[B, H, T, D]`, projected and convolved, of hidden states `[B, T, E]`.

        Args:
            name: `"q"`, `"k"` or `"v"`.
            token_mask: `[B, T]`, or longer on the left, False for padding, which the convolution reads as zeros.
            document_positions: `[B, T]`, positions from 0 in each packed document.
            extend: puts the context that a cache keeps in front of the projected tokens `[B, T, H * D]`; without it
                the first token is the beginning of the sequence.
        """
        projection, conv = getattr(self, f"{name}_proj"), getattr(self, f"{name}_conv")
        projected = projection(hidden_states)
        if conv is None:
            return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if token_mask is not None:
            projected = projected * token_mask[:, -projected.shape[1] :, None]
        projected = conv.pad(projected) if extend is None else extend(projected)
        return conv(projected.unflatten(-1, (-1, self.head_dim)), document_positions).transpose(1, 2)

    def attention_op(self, name: str | None) -> Attention:
        """The attention op of a call, by default the configuration's.

        `sdpa` replaces `chunked` where there are neither causality nor position tables: what is left is plain
        attention, whose kernels in PyTorch are faster and need linear memory too.
        """
        is_relative = getattr(self, "position_embeddings", None) is not None
        name = resolve_relative(name or self.config._attn_implementation, relative=is_relative)
        is_plain = not self.is_causal and not is_relative
        return RELATIVE_IMPLEMENTATIONS["sdpa" if name == "chunked" and is_plain else name]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, implementation: str | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The output `[B, T, E]` and, from `eager`, the probabilities `[B, H, T, S]`; `options` are those of the op.

        Queries are `[B, H, T, D]`, keys and values `[B, H, S, D]`.
        """
        options |= {"scaling": self.scaling, "is_causal": self.is_causal}
        options["dropout"] = self.config.attention_dropout if self.training else 0.0
        output, weights = self.attention_op(implementation)(query, key, value, **options)
        return self.o_proj(output.flatten(2)), weights


class RCMHAAttention(ConvolvedHeads):
    """Multi-head attention with the convolutions and position terms of the configured `attention_type`."""

    def __init__(self, config: RelativeConfig, layer_idx: int, *, is_causal: bool = True) -> None:
        """Makes the layer of a decoder or, with `is_causal=False`, of an encoder, whose tokens see later ones too."""
        later = 0 if is_causal else config.later_conv_tokens
        super().__init__(config, layer_idx, qk_bias=bool(config.qk_bias), later=later, query_later=later)
        self.is_causal = is_causal
        self.later_rows = 0 if is_causal else config.num_relative_positions - 1
        for name in ("position_embeddings", "position_bias", "content_bias"):
            self.register_parameter(name, None)
        if config.is_relative:
            rows, heads = self.later_rows + config.num_relative_positions, config.num_attention_heads
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
        await_copies(streaming, hidden_states.device)
        query = self._project("q", hidden_states[:, -segment.length :], segment, streaming)
        key = self._project("k", hidden_states, segment, streaming)
        value = self._project("v", hidden_states, segment, streaming)
        if segment.rotary is not None:
            cos, sin = segment.rotary
            query, key = rotate(query, cos[:, -segment.length :], sin[:, -segment.length :]), rotate(key, cos, sin)
        if streaming is not None:
            key, value = update_layer(streaming, key, value, self.layer_idx)
        position_bias = self.position_bias
        if segment.scheme_bias is not None:
            # The op scales the sum of all its terms, but this bias is added to scaled scores.
            position_bias = segment.scheme_bias.to(at_least_float32(query.dtype)) / self.scaling
        tables = (self.position_embeddings, position_bias, self.content_bias)
        options: dict[str, Any] = {
            "attention_mask": attention_mask,
            "sliding_window": self.config.sliding_window,
            "terms": PositionTerms(*tables, segment.query_offset, self.later_rows, has_finite_bias=True),
        }
        return self.attend(query, key, value, implementation, **options)

    def _project(self, name: str, hidden_states: Tensor, segment: Segment, streaming: Cache | None) -> Tensor:
        """As `project`, for a segment; convolutions start with the context that the cache `streaming` keeps, if any."""
        layer: Any = None if streaming is None else streaming.layers[self.layer_idx]
        extend = partial(layer.extend, name) if layer is not None and layer.context_length else None
        return self.project(name, hidden_states, segment.token_mask, segment.document_positions, extend)


class RCMHACrossAttention(ConvolvedHeads):
    """Attention of a target to a source. Between these there are no distances, so scores depend on content only."""

    def __init__(self, config: RelativeConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx, qk_bias=True, later=config.later_conv_tokens, query_later=0)
        self.is_causal = False

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor,
        segment: Segment,
        source_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        implementation: str | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output `[B, T, E]` and, from `eager`, the probabilities `[B, H, T, S]`.

        Args:
            hidden_states: `[B, T, E]`, of the target.
            key_value_states: `[B, S, E]`, of the source.
            source_mask: `[B, S]`, False for padding.
            attention_mask: broadcastable to `[B, 1, T, S]`, boolean or additive.
            past_key_values: its cross-attention cache keeps the source's keys and values, which are computed once. The
                left context of the query convolution is in its self-attention cache, beside those of the target.
            implementation: of the attention op, by default the configuration's.
        """
        own: Any = None if past_key_values is None else past_key_values.self_attention_cache.layers[self.layer_idx]
        extend = None if own is None else partial(own.extend, "cross_q")
        query = self.project("q", hidden_states, segment.token_mask, extend=extend)
        key, value = self._read_source(key_value_states, source_mask, past_key_values)
        return self.attend(query, key, value, implementation, attention_mask=attention_mask, sliding_window=None)

    def _read_source(
        self, source: Tensor, source_mask: Tensor | None, past_key_values: EncoderDecoderCache | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H, S, D]` of `source` `[B, S, E]`, convolved; from the second call on from the cache."""
        if past_key_values is None:
            return self._project_source(source, source_mask)
        cache, length = past_key_values.cross_attention_cache, source.shape[1]
        if past_key_values.is_updated.get(self.layer_idx):
            key, value = read_layer(cache, self.layer_idx, source.device)
        else:
            key, value = update_layer(cache, *self._project_source(source, source_mask), self.layer_idx)
            past_key_values.is_updated[self.layer_idx] = True
        return key[:, :, :length], value[:, :, :length]

    def _project_source(self, source: Tensor, source_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """What `_read_source` returns without a cache."""
        return self.project("k", source, source_mask), self.project("v", source, source_mask)
