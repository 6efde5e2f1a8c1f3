"""Memory between segments as Transformers cache layers. What they keep is detached: gradients stay in a segment.

Streaming layers keep keys and values after the convolution, and the last projected rows before it, which are the left
context of the next segment's convolutions. A segment layer keeps the inputs of a model layer, of which keys and values
are made anew for every segment, as in Transformer-XL.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)


class StreamingLayerMixin:
    """Adds `contexts`: the rows `[B, W - 1, H * D]` before the next token of each projection that is convolved."""

    contexts: dict[str, Tensor]
    width: int  # rows of a context that the next token needs
    record_past: bool
    is_initialized: bool

    @classmethod
    def from_plain(cls, layer: CacheLayerMixin, width: int) -> "StreamingLayerMixin":
        """Returns `layer` with memory of `width` rows for convolutions; it may be allocated, but must hold no tokens.

        Raises:
            ValueError: the layer already holds tokens, whose projections nobody kept.
        """
        refuse_tokens(layer)
        streaming = cls.__new__(cls)
        streaming.__dict__.update(vars(layer))
        streaming.contexts, streaming.width = {}, width
        streaming.record_past = getattr(layer, "record_past", False)
        return streaming

    def extend(self, name: str, rows: Tensor) -> Tensor:
        """Puts the context of projection `name` before new `rows` `[B, T, H * D]`, and keeps theirs for the next call.

        Returns:
            `[B, W - 1 + T, H * D]`.
        """
        if name not in self.contexts:
            self.contexts[name] = rows.new_zeros(rows.shape[0], self.width, rows.shape[2])
        context = self.contexts[name]
        extended = torch.cat([context[:, context.shape[1] - self.width :], rows], dim=1)
        if self.record_past:
            self.contexts[name] = torch.cat([context, rows.detach()], dim=1)
        else:  # in place, because compiled decoding relies on the address
            context.copy_(extended[:, extended.shape[1] - self.width :].detach())
        return extended

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As the plain layer; what stays for later segments is cut off from the graph."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
        if self.keys.requires_grad or self.values.requires_grad:
            self.keys, self.values = self.keys.detach(), self.values.detach()
        return keys, values

    keys: Tensor
    values: Tensor

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        for context in self.contexts.values():
            context.zero_()

    def offload(self) -> None:
        super().offload()  # type: ignore[misc]
        self._map_contexts(lambda context: context.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        super().prefetch()  # type: ignore[misc]
        if self.is_initialized:
            self._map_contexts(lambda context: context.to(self.device, non_blocking=True))

    device: torch.device

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._map_contexts(lambda context: context.index_select(0, beam_idx.to(context.device)))

    def _map_contexts(self, change: Callable[[Tensor], Tensor]) -> None:
        self.contexts = {name: change(context) for name, context in self.contexts.items()}


class _StreamingDynamicMixin(StreamingLayerMixin):
    """What only growing layers can do."""

    def activate_past_recording(self) -> None:
        if hasattr(super(), "activate_past_recording"):
            super().activate_past_recording()  # type: ignore[misc]
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last tokens.

        Raises:
            RuntimeError: rows before the convolution are gone, because recording was not switched on.
        """
        if self.contexts and self.width and not self.record_past:
            raise RuntimeError(
                "a cache of convolved tokens can be cropped only while it records the past; call "
                "activate_past_recording() before the tokens that may be taken back"
            )
        super().crop(tokens_to_remove)  # type: ignore[misc]
        keep = -abs(tokens_to_remove) or None
        self._map_contexts(lambda context: context[:, :keep][:, -self.width :] if self.width else context)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self._map_contexts(lambda context: context.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._map_contexts(lambda context: context[indices])


class StreamingDynamicLayer(_StreamingDynamicMixin, DynamicLayer):  # type: ignore[misc]
    """Grows with every token, contexts included, so that like the plain layer it can be cropped at any time."""

    @classmethod
    def from_plain(cls, layer: CacheLayerMixin, width: int) -> StreamingLayerMixin:
        streaming = super().from_plain(layer, width)
        streaming.record_past = True
        return streaming


class StreamingDynamicSlidingWindowLayer(_StreamingDynamicMixin, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """Grows up to the window."""


class StreamingStaticLayer(StreamingLayerMixin, StaticLayer):  # type: ignore[misc]
    """Allocated once, for compiled decoding."""


class StreamingStaticSlidingWindowLayer(StreamingLayerMixin, StaticSlidingWindowLayer):  # type: ignore[misc]
    """Allocated once, at the width of the window."""


class SegmentMemoryLayer(DynamicLayer):
    """Keeps the inputs of one model layer over the last `mem_len` tokens, as `keys` `[B, 1, M, E]`; no `values`."""

    is_croppable = False

    def __init__(self, mem_len: int | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mem_len = mem_len
        self.cumulative_length = 0

    def extend(self, hidden_states: Tensor) -> Tensor:
        """Puts the memory before a segment `[B, T, E]`, and makes both the next memory. Returns `[B, M + T, E]`."""
        if not self.is_initialized:
            self.lazy_initialization(hidden_states[:, None], hidden_states[:, None, :, :0])
            self.keys = hidden_states[:, None, :0]
        whole = torch.cat([self.keys, hidden_states[:, None]], dim=2)  # type: ignore[list-item]
        kept = whole.shape[2] if self.mem_len is None else min(self.mem_len, whole.shape[2])
        self.keys = whole[:, :, whole.shape[2] - kept :].detach()
        self.values = self.keys[..., :0]
        self.cumulative_length += hidden_states.shape[1]
        return whole[:, 0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Memory and segment together, and the position of the oldest token in memory."""
        kept = self.cumulative_length if self.mem_len is None else min(self.mem_len, self.cumulative_length)
        return kept + query_length, self.cumulative_length - kept

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def reset(self) -> None:
        super().reset()
        self.cumulative_length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: what a segment pushed out of the memory is gone."""
        raise RuntimeError("segment memory cannot take tokens back; use memory_type='streaming'")


STREAMING_LAYERS: dict[type, type[StreamingLayerMixin]] = {
    DynamicLayer: StreamingDynamicLayer,
    DynamicSlidingWindowLayer: StreamingDynamicSlidingWindowLayer,
    StaticLayer: StreamingStaticLayer,
    StaticSlidingWindowLayer: StreamingStaticSlidingWindowLayer,
}


def carry_memory(cache: Cache, config: PreTrainedConfig) -> None:
    """Makes `cache` keep what the layers of an RCMHA model need, in place; does nothing where it already does.

    Callers therefore hand any dynamic or static cache to the model, made with or without a configuration.

    Raises:
        ValueError: a layer of a kind that cannot, or one that holds tokens whose memory nobody kept.
    """
    while len(cache.layers) < config.num_hidden_layers and cache.layer_class_to_replicate is not None:
        window = config.sliding_window
        cache.layers.append(DynamicLayer() if window is None else DynamicSlidingWindowLayer(window))
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, (StreamingLayerMixin, SegmentMemoryLayer)):
            continue
        cache.layers[index] = _with_memory(layer, config)


def refuse_tokens(layer: CacheLayerMixin) -> None:
    """Raises ValueError where a plain layer already holds tokens."""
    if layer.is_initialized and int(layer.get_seq_length()) > 0:
        raise ValueError(
            f"the cache holds {int(layer.get_seq_length())} tokens without the memory of this model; "
            "start with an empty cache, or one that a model of this configuration filled"
        )


def _with_memory(layer: Any, config: PreTrainedConfig) -> CacheLayerMixin:
    if config.memory_type == "segment":
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ValueError(
                f"memory_type='segment' keeps layer inputs, which a {type(layer).__name__} cannot; use a DynamicCache, "
                "or memory_type='streaming'"
            )
        refuse_tokens(layer)
        return SegmentMemoryLayer(config.mem_len)
    if type(layer) not in STREAMING_LAYERS:
        raise ValueError(f"a {type(layer).__name__} cannot carry memory; use a DynamicCache or a StaticCache")
    width = config.conv_kernel_size - 1 if config.convolves else 0
    return STREAMING_LAYERS[type(layer)].from_plain(layer, width)  # type: ignore[return-value]
