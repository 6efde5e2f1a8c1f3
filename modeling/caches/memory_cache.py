"""The cache with the memory that an RCMHA model carries from segment to segment, in one of two types of layers.

All that is kept is detached, so that no gradient flows from one segment into an earlier one.
"""

from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from .key_places import refuse_tokens
from .segment_memory import SegmentMemoryLayer
from .streaming_memory import STREAMING_LAYERS, StreamingLayerMixin


def upgrade_to_memory_cache(cache: Cache, config: PreTrainedConfig, layers: int | None = None) -> None:
    """Replaces the plain layers of `cache`, in place, by layers that keep the memory of an RCMHA model.

    The cache may be any dynamic or static one, made with or without a configuration. Calling this again changes
    nothing.

    Args:
        layers: number of the model's layers, by default the configuration's.

    Raises:
        ValueError: a layer has a kind that cannot keep memory, or holds tokens whose memory is lost.
    """
    while len(cache.layers) < (layers or config.num_hidden_layers) and cache.layer_class_to_replicate is not None:
        window = config.sliding_window
        cache.layers.append(DynamicLayer() if window is None else DynamicSlidingWindowLayer(window))
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, (StreamingLayerMixin, SegmentMemoryLayer)):
            continue
        cache.layers[index] = _with_memory(layer, config)


def _with_memory(layer: Any, config: PreTrainedConfig) -> CacheLayerMixin:
    """The layer that replaces a plain one; raises ValueError as `upgrade_to_memory_cache` says."""
    if config.memory_type == "segment":
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ValueError(
                f"memory_type='segment' keeps layer inputs, which a {type(layer).__name__} cannot; use a DynamicCache, "
                "or memory_type='streaming'"
            )
        refuse_tokens(layer, "the memory of this model")
        return SegmentMemoryLayer(config.mem_len)
    if type(layer) not in STREAMING_LAYERS:
        raise ValueError(f"a {type(layer).__name__} cannot carry memory; use a DynamicCache or a StaticCache")
    context_length = config.conv_kernel_size - 1 if config.convolves else 0
    return STREAMING_LAYERS[type(layer)].from_plain(layer, context_length)  # type: ignore[return-value]
