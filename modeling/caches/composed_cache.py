"""Cache layers that keep the key-side composition factors of the cached tokens beside keys and values.

A composed layer is an ordinary Transformers cache layer and contains a second one of the same kind, which holds the
factors. Growing, sliding, static allocation, cropping, reordering and offloading therefore treat both alike. Only where
keys and values are quantized, the factors are not: a growing layer holds them as they are.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    HQQQuantizedLayer,
    QuantoQuantizedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .cropping import refuse_lost_tokens, refuse_moved_window
from .key_places import refuse_tokens


class ComposedLayerMixin:
    """Adds `factors`: a plain layer that holds packed factors as its keys, and values of width 0.

    Packed factors are `[B, P * terms, S, H]` for `P` stages: the terms of `DynamicComposition`, in its order.
    """

    factors: Any
    is_initialized: bool  # provided by the plain layer
    # Whether the last tokens came without their factors, which `update_factors` is to append.
    lacks_factors: bool = False

    @classmethod
    def from_plain(cls, layer: CacheLayerMixin) -> "ComposedLayerMixin":
        """Returns `layer` as a composed layer. Its memory may be allocated already, but it must not hold tokens.

        Raises:
            ValueError: the layer already holds tokens, whose factors are lost.
        """
        refuse_tokens(layer, "composition factors")
        composed = cls.__new__(cls)
        composed.__dict__.update(vars(layer))
        composed.factors = cls.factors_layer(layer)
        return composed

    @classmethod
    def factors_layer(cls, layer: CacheLayerMixin) -> CacheLayerMixin:
        """The layer that keeps the factors of the tokens in `layer`: one of its kind and settings, not allocated."""
        empty = copy.copy(layer)
        empty.keys = empty.values = None
        empty.is_initialized = False
        count = getattr(layer, "cumulative_length", None)
        if isinstance(count, torch.Tensor):
            empty.cumulative_length = torch.zeros_like(count)  # type: ignore[assignment]
        return empty

    def update(
        self, key_states: Tensor, value_states: Tensor, key_factors: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Appends `T` tokens and returns `(keys, (values, factors))` of all `S` tokens that their queries may see.

        The result is nested because `Cache.update` passes on exactly two values.

        Args:
            key_states, value_states: `[B, H_kv, T, D]`; returned as `[B, H_kv, S, D]`.
            key_factors: `[B, P * terms, T, H]`; returned as `[B, P * terms, S, H]`. Without them the result is
                `(keys, values)`, as in models that know nothing of factors, whose attention calls `update_factors`.
        """
        if key_factors is None:
            self.lacks_factors = True
            return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
        factors, _ = self.factors.update(key_factors, key_factors[..., :0])
        keys, values = super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
        return keys, (values, factors)

    def update_factors(self, key_factors: Tensor) -> Tensor:
        """Appends the factors `[B, P * terms, T, H]` of the tokens that came last, and returns those of all."""
        self.lacks_factors = False
        factors, _ = self.factors.update(key_factors, key_factors[..., :0])
        return factors

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self.factors.reset()

    def offload(self) -> None:
        super().offload()  # type: ignore[misc]
        self.factors.offload()

    def prefetch(self) -> None:
        super().prefetch()  # type: ignore[misc]
        self.factors.prefetch()

    def crop(self, tokens_to_remove: int) -> None:
        # A draft of the first layers leaves the others empty, which Transformers 5.17 cannot crop.
        if self.is_initialized:
            super().crop(tokens_to_remove)  # type: ignore[misc]
            self.factors.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Selects batch rows `beam_idx` `[B]`."""
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self.factors.reorder_cache(beam_idx)


class _ComposedDynamicMixin(ComposedLayerMixin):
    """Operations that only dynamic layers have."""

    def reset(self) -> None:
        """Drops all tokens; Transformers 5.17 itself would keep as many zeros."""
        self.is_initialized = self.factors.is_initialized = False
        super().reset()

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self.factors.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the batch rows `indices` `[B]`."""
        super().batch_select_indices(indices)  # type: ignore[misc]
        self.factors.batch_select_indices(indices)


class ComposedDynamicLayer(_ComposedDynamicMixin, DynamicLayer):
    """Grows with every token."""

    def __init__(self) -> None:
        """Makes an empty layer, for a cache that makes its layers as they are needed."""
        super().__init__()
        self.factors = DynamicLayer()


class ComposedDynamicSlidingWindowLayer(_ComposedDynamicMixin, DynamicSlidingWindowLayer):
    """Grows up to the sliding window."""

    def update(
        self, key_states: Tensor, value_states: Tensor, key_factors: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Appends tokens as `ComposedLayerMixin.update` does.

        Transformers 5.17 also returns earlier tokens while it records the past. They are left out, because the mask has
        no columns for them.
        """
        if key_factors is None:
            return super().update(key_states, value_states, None, *args, **kwargs)
        visible, _ = self.get_mask_sizes(key_states.shape[2])
        keys, (values, factors) = super().update(key_states, value_states, key_factors, *args, **kwargs)
        return keys[:, :, -visible:], (values[:, :, -visible:], factors[:, :, -visible:])

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens; raises RuntimeError as `refuse_lost_tokens` does."""
        refuse_lost_tokens(self, tokens_to_remove)
        super().crop(tokens_to_remove)

    def activate_past_recording(self) -> None:
        super().activate_past_recording()
        self.factors.activate_past_recording()


class ComposedStaticLayer(ComposedLayerMixin, StaticLayer):
    """Allocated once, for compiled decoding."""


class ComposedStaticSlidingWindowLayer(ComposedLayerMixin, StaticSlidingWindowLayer):
    """Allocated once, at the length of the sliding window."""

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens; raises RuntimeError as `refuse_moved_window` does."""
        refuse_moved_window(self, tokens_to_remove)
        super().crop(tokens_to_remove)


class _ComposedQuantizedMixin(_ComposedDynamicMixin):
    """Quantizes keys and values but not factors, which are few, and an error in one of which would reach all heads."""

    @classmethod
    def factors_layer(cls, layer: CacheLayerMixin) -> CacheLayerMixin:
        """A layer that grows with every token, for the factors of the tokens in `layer`."""
        return DynamicLayer()


class ComposedQuantoQuantizedLayer(_ComposedQuantizedMixin, QuantoQuantizedLayer):
    """Keys and values in integers of 2 or 4 bits, by optimum-quanto."""


class ComposedHQQQuantizedLayer(_ComposedQuantizedMixin, HQQQuantizedLayer):
    """Keys and values in integers of 1 to 8 bits, by HQQ."""


COMPOSED_LAYERS: dict[type, Any] = {
    DynamicLayer: ComposedDynamicLayer,
    DynamicSlidingWindowLayer: ComposedDynamicSlidingWindowLayer,
    StaticLayer: ComposedStaticLayer,
    StaticSlidingWindowLayer: ComposedStaticSlidingWindowLayer,
    QuantoQuantizedLayer: ComposedQuantoQuantizedLayer,
    HQQQuantizedLayer: ComposedHQQQuantizedLayer,
}

if hasattr(cache_utils, "Fp8QuantizedLayer"):  # older versions of Transformers do not have it

    class ComposedFp8QuantizedLayer(_ComposedQuantizedMixin, cache_utils.Fp8QuantizedLayer):
        """Keys and values in floating-point numbers of 8 bits."""

    COMPOSED_LAYERS[cache_utils.Fp8QuantizedLayer] = ComposedFp8QuantizedLayer


class _ComposedHybridMixin(ComposedLayerMixin):
    """Layers of hybrid models also hold states of linear attention, which know nothing of composition."""

    attention: type[CacheLayerMixin]

    @classmethod
    def factors_layer(cls, layer: CacheLayerMixin) -> CacheLayerMixin:
        """The layer that keeps the factors of the tokens in `layer`: one of attention alone, not allocated."""
        empty = super().factors_layer(layer)
        empty.__class__ = cls.attention
        return empty


for _name in (  # of which older versions of Transformers do not have all
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "LinearAttentionAndStaticFullAttentionLayer",
    "LinearAttentionAndStaticSlidingWindowAttentionLayer",
):
    if (_hybrid := getattr(cache_utils, _name, None)) is not None:
        _attention = next(base for base in _hybrid.__mro__ if base in COMPOSED_LAYERS)
        _bases = (_ComposedHybridMixin, COMPOSED_LAYERS[_attention], _hybrid)
        COMPOSED_LAYERS[_hybrid] = type(f"Composed{_name}", _bases, {"attention": _attention, "__module__": __name__})

QUANTIZED_LAYERS = tuple(
    plain for plain, composed in COMPOSED_LAYERS.items() if issubclass(composed, _ComposedQuantizedMixin)
)


def upgrade_to_composed_cache(cache: Cache) -> None:
    """Replaces the plain layers of `cache`, in place, by layers that also keep composition factors.

    The cache may be any dynamic, static or quantized one, made with or without a configuration. Calling this again
    changes nothing.

    Raises:
        ValueError: a layer has another kind (one of another package, for example), or holds tokens without factors.
    """
    # A cache that was made without a configuration has no layers yet. It makes layers of this class when it needs them.
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = ComposedDynamicLayer
    for index in range(len(cache.layers)):
        upgrade_layer(cache, index)


def upgrade_layer(cache: Cache, index: int) -> Any:
    """Replaces one layer of `cache`, in place, as `upgrade_to_composed_cache` replaces all, and returns the new one.

    A cache that was made without a configuration gets its layers up to this one.

    Raises:
        ValueError: as `upgrade_to_composed_cache`.
    """
    while cache.layer_class_to_replicate is not None and len(cache.layers) <= index:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if not isinstance(layer, ComposedLayerMixin):
        if type(layer) not in COMPOSED_LAYERS:
            raise ValueError(
                f"a {type(layer).__name__} cannot keep composition factors; use a DynamicCache or a StaticCache of "
                "attention layers, or compose_key_wise=False"
            )
        cache.layers[index] = COMPOSED_LAYERS[type(layer)].from_plain(layer)
    return cache.layers[index]
