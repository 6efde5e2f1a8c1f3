"""Memory of the type `streaming`: cache layers that go on with convolutions where the last segment ended.

They keep convolved keys and values, and also the last few projected tokens before their convolution, which the
convolutions of the next segment need as left context.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .cropping import refuse_lost_tokens, refuse_moved_window
from .key_places import refuse_tokens


class StreamingLayerMixin:
    """Adds `contexts`: for each convolved projection (query, key, value) its last tokens before the convolution.

    A context is `[B, context_length, H * D]`. While the past is recorded it keeps all tokens, so that `crop` can go
    back to an earlier one.
    """

    contexts: dict[str, Tensor]
    context_length: int  # number of earlier tokens that the convolution of a token reads
    record_past: bool  # set by `activate_past_recording`, which Transformers calls in assisted generation
    always_records: ClassVar[bool] = False
    # Provided by the plain layer.
    keys: Tensor
    values: Tensor
    device: torch.device
    is_initialized: bool

    @classmethod
    def from_plain(cls, layer: CacheLayerMixin, context_length: int) -> "StreamingLayerMixin":
        """Returns `layer` with contexts. Its memory may be allocated already, but it must not hold tokens.

        Raises:
            ValueError: the layer already holds tokens, whose contexts are lost.
        """
        refuse_tokens(layer, "the memory of this model")
        streaming = cls.__new__(cls)
        streaming.__dict__.update(vars(layer))
        streaming.contexts, streaming.context_length = {}, context_length
        streaming.record_past = getattr(layer, "record_past", False)
        return streaming

    def extend(self, name: str, projected: Tensor) -> Tensor:
        """Puts the context in front of new tokens of a projection, and keeps the end of both as the next context.

        Args:
            name: of the projection.
            projected: its new tokens before the convolution, `[B, T, H * D]`.

        Returns:
            `[B, context_length + T, H * D]`.
        """
        if name not in self.contexts:
            self.contexts[name] = projected.new_zeros(projected.shape[0], self.context_length, projected.shape[2])
        # The query of a cross-attention has its context in the layer of self-attention, which may be offloaded already.
        context = self.contexts[name] = self.contexts[name].to(projected.device)
        # A tensor made in inference mode must not be changed in place outside of it. Compilers cannot trace this check.
        if not (torch.compiler.is_compiling() or torch.is_inference_mode_enabled()) and context.is_inference():
            context = self.contexts[name] = context.clone()
        extended = torch.cat([context[:, context.shape[1] - self.context_length :], projected], dim=1)
        kept = extended[:, extended.shape[1] - self.context_length :].detach()
        if self.records:
            self.contexts[name] = torch.cat([context, projected.detach()], dim=1)
        elif context.shape == kept.shape:  # in place, because compiled decoding captures the address of the tensor
            context.copy_(kept)
        else:  # the past was recorded up to here
            self.contexts[name] = kept
        return extended

    @property
    def records(self) -> bool:
        """Whether contexts keep all tokens now."""
        return self.always_records or self.record_past

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends keys and values `[B, H, T, D]` like the plain layer, and detaches what is kept for later segments."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
        if self.keys.requires_grad or self.values.requires_grad:
            self.keys, self.values = self.keys.detach(), self.values.detach()
        return keys, values

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

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Selects batch rows `beam_idx` `[B]`."""
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._map_contexts(lambda context: context.index_select(0, beam_idx.to(context.device)))

    def _map_contexts(self, change: Callable[[Tensor], Tensor]) -> None:
        """Applies `change` to every context `[B, tokens, H * D]`."""
        self.contexts = {name: change(context) for name, context in self.contexts.items()}


class _StreamingDynamicMixin(StreamingLayerMixin):
    """Operations that only dynamic layers have."""

    def reset(self) -> None:
        """Drops contexts and keys, as the next batch may have another size or dtype."""
        self.contexts = {}
        self.is_initialized = False  # Transformers 5.17 itself would keep as many zeros
        super().reset()

    def activate_past_recording(self) -> None:
        if hasattr(super(), "activate_past_recording"):
            super().activate_past_recording()  # type: ignore[misc]
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens; Transformers gives their number as a negative one.

        Raises:
            RuntimeError: the contexts of the tokens before them are lost, because the past was not recorded, or was
                recorded only since the last crop.
        """
        removed = abs(tokens_to_remove)
        if self.contexts and not self.records:
            raise RuntimeError(
                "a cache of convolved tokens can be cropped only while it records the past; call "
                "activate_past_recording() before the tokens that may be taken back"
            )
        if any(context.shape[1] - removed < self.context_length for context in self.contexts.values()):
            raise RuntimeError(
                f"{removed} convolved tokens cannot be taken back: fewer have been added since the last crop, which "
                "kept only what further tokens need"
            )
        super().crop(tokens_to_remove)  # type: ignore[misc]
        self._map_contexts(lambda context: context[:, : context.shape[1] - removed])

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self._map_contexts(lambda context: context.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the batch rows `indices` `[B]`."""
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._map_contexts(lambda context: context[indices])


class StreamingDynamicLayer(_StreamingDynamicMixin, DynamicLayer):  # type: ignore[misc]
    """Grows with every token. It records contexts from the start, so that it can be cropped like the plain layer."""

    always_records = True


class StreamingDynamicSlidingWindowLayer(_StreamingDynamicMixin, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """Grows up to the sliding window."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends keys and values `[B, H, T, D]`, and returns as many as the mask has columns.

        Transformers 5.17 returns more of them while it records the past.
        """
        visible, _ = self.get_mask_sizes(key_states.shape[2])
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys[:, :, -visible:], values[:, :, -visible:]

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens, and all of the recorded past that further tokens do not need.

        Raises:
            RuntimeError: contexts are lost, or tokens, see `refuse_lost_tokens`.
        """
        if not self.contexts:  # contexts are lost before tokens are
            refuse_lost_tokens(self, tokens_to_remove)
        super().crop(tokens_to_remove)
        self._map_contexts(lambda context: context[:, context.shape[1] - self.context_length :])


class _StreamingStaticMixin(StreamingLayerMixin):
    """A static layer has no room for earlier contexts, so only without convolutions can tokens be taken back."""

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can put this layer back as it was."""
        return not self.context_length and super().is_croppable  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens.

        Raises:
            RuntimeError: there are convolutions.
        """
        if self.context_length:
            raise RuntimeError("a static cache cannot take convolved tokens back; use a DynamicCache")
        super().crop(tokens_to_remove)  # type: ignore[misc]


class StreamingStaticLayer(_StreamingStaticMixin, StaticLayer):  # type: ignore[misc, override]
    """Allocated once, for compiled decoding."""


class StreamingStaticSlidingWindowLayer(_StreamingStaticMixin, StaticSlidingWindowLayer):  # type: ignore[misc, override]
    """Allocated once, at the length of the sliding window."""

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens.

        Raises:
            RuntimeError: there are convolutions, or tokens are lost, see `refuse_moved_window`.
        """
        refuse_moved_window(self, tokens_to_remove)
        super().crop(tokens_to_remove)


STREAMING_LAYERS: dict[type, type[StreamingLayerMixin]] = {
    DynamicLayer: StreamingDynamicLayer,
    DynamicSlidingWindowLayer: StreamingDynamicSlidingWindowLayer,
    StaticLayer: StreamingStaticLayer,
    StaticSlidingWindowLayer: StreamingStaticSlidingWindowLayer,
}
