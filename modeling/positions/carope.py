"""Context-aware rotary embedding (CARoPE, arXiv 2507.23083): rotary frequencies for each head and token from content.

A token with hidden state `x` has a frequency `f = 1 / (softplus(x W + b) + 1)` for each key head. Pair `i` of a head
is rotated by a phase, the sum of `f ** i` over all tokens up to this one. The paper has no `b`; with it a new model
rotates almost as rotary embedding does, since `W` is small at first. Query heads take the phases of their key head, so
that only key heads have phases.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.cache_utils import Cache, StaticLayer

from ..ops.dtypes import at_least_float32
from .rotary import rotate


class FrequencyProjection(nn.Linear):
    """From hidden states `[..., E]` to `x W + b`, `[..., H_kv]`.

    It is a class of its own because `_init_weights` must recognize it: its bias is initialized in its own way. For a
    model outside Transformers, `_init_weights` is called only for modules that own parameters, which `ContentRotary`
    does not.
    """

    def __init__(self, hidden_size: int, kv_heads: int, head_dim: int, rope_theta: float) -> None:
        self.head_dim, self.rope_theta = head_dim, rope_theta
        super().__init__(hidden_size, kv_heads)

    @torch.no_grad()
    def init_bias(self) -> None:
        """Sets the bias such that, with weights of zero, frequencies and phases are those of rotary embedding."""
        softplus = self.rope_theta ** (2 / self.head_dim) - 1
        # The inverse of softplus, in the form that does not overflow.
        init.constant_(self.bias, softplus + math.log(-math.expm1(-softplus)))


class ContentRotary(nn.Module):
    """The phases of one layer."""

    def __init__(self, hidden_size: int, kv_heads: int, head_dim: int, rope_theta: float) -> None:
        super().__init__()
        self.frequency = FrequencyProjection(hidden_size, kv_heads, head_dim, rope_theta)
        self.head_dim = head_dim

    def forward(self, hidden_states: Tensor, past: Tensor | None = None, token_mask: Tensor | None = None) -> Tensor:
        """The phases of new tokens, at least float32 `[B, H_kv, T, D / 2]`.

        Args:
            hidden_states: `[B, T, E]`, normalized.
            past: the phases of the last earlier token, `[B, H_kv, 1, D / 2]`.
            token_mask: `[B, T]`, False for padding, which adds nothing to the phases of later tokens.
        """
        logits = self.frequency(hidden_states)[..., None]
        frequency = 1 / (F.softplus(logits.to(at_least_float32(logits.dtype))) + 1)
        # Transposed only now: the compiler's backend `aot_eager` expects other strides of the gradient of a softplus of
        # transposed numbers than PyTorch computes, and fails.
        steps = (frequency ** torch.arange(self.head_dim // 2, device=logits.device)).transpose(1, 2)
        if token_mask is not None:
            steps = steps * token_mask[:, None, :, None]
        phases = steps.cumsum(2)
        return phases if past is None else phases + past

    def angles(self, phases: Tensor, repeats: int = 1) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[B, H, T, D]` of phases `[B, H_kv, T, D / 2]`, those of each key head `repeats` times."""
        angles = torch.cat((phases, phases), dim=-1).repeat_interleave(repeats, dim=1)
        return angles.cos(), angles.sin()


def pack_phases(key: Tensor, phases: Tensor) -> Tensor:
    """Keys `[B, H_kv, T, D]` with their phases `[B, H_kv, T, D / 2]` behind them, as a cache layer keeps them.

    A cache has one dtype, but only copies what it keeps. So the bits of float32 phases are viewed as twice as many
    elements in half precision.
    """
    return torch.cat([key, _bits_as(phases, key.dtype)], dim=-1)


def cached_phases(keys: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """The phases `[B, H_kv, S, D / 2]`, in `dtype`, behind the keys `[B, H_kv, S, D + ...]` of a cache layer."""
    return _bits_as(keys[..., head_dim:], dtype)


def _bits_as(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of `numbers` `[..., N]` read as `dtype`; exporters have no such operation, so only if it is another."""
    return numbers if numbers.dtype == dtype else numbers.contiguous().view(dtype)


def turn_cached_keys(keys: Tensor, step: Tensor) -> Tensor:
    """Keys of a cache layer, with their phases behind them, after a further turn by `step` `[B, H_kv, 1, D / 2]`."""
    head_dim = 2 * step.shape[-1]
    angles = torch.cat((step, step), dim=-1)
    turned = rotate(keys[..., :head_dim], angles.cos(), angles.sin())
    return pack_phases(turned, cached_phases(keys, head_dim, step.dtype) + step)


def last_phases(cache: Cache | None, layer_idx: int, head_dim: int, dtype: torch.dtype) -> Tensor | None:
    """The phases of the last token in a layer of a cache, `[B, H_kv, 1, D / 2]` in `dtype`; None without tokens.

    Raises:
        ValueError: the cache is quantized, which would change those bits.
    """
    layer: Any = cache.layers[layer_idx] if cache is not None and layer_idx < len(cache.layers) else None
    if layer is None or not layer.is_initialized:
        return None
    if hasattr(layer, "_quantized_keys"):
        raise ValueError("position_scheme='carope' keeps phases in its cache, which a quantized one would round")
    if isinstance(layer, StaticLayer) and not _is_full(layer):
        return _phases_before_empty_places(layer, head_dim, dtype)
    last: Tensor = layer.keys[:, :, -1:]
    return cached_phases(last, head_dim, dtype) if last.shape[2] else None


def _is_full(layer: Any) -> bool:
    """Whether a sliding static layer is full, so that its last token is in its last place.

    Its count on the device stops there, and so cannot tell. The integer goes on; other static layers have none. It is
    only compared, because compiled code would be made anew for each value that it calculates with.
    """
    return bool(getattr(layer, "cumulative_length_int", 0) >= layer.keys.shape[2])


def _phases_before_empty_places(layer: Any, head_dim: int, dtype: torch.dtype) -> Tensor:
    """The phases of the last token in a static layer with empty places, zeros if all are empty.

    The number of tokens is a tensor on the device, for which compiled code does not wait.
    """
    count = torch.as_tensor(layer.cumulative_length, device=layer.keys.device)
    last = (count.reshape(1) - 1).clamp(0, layer.keys.shape[2] - 1)
    phases = cached_phases(layer.keys.index_select(2, last), head_dim, dtype)
    return torch.where(count > 0, phases, 0)


def make_room_for_phases(cache: Cache, config: PreTrainedConfig) -> None:
    """Makes layers of `cache` that were allocated for keys alone allocate again, with room for phases beside the keys.

    Before it reads a prompt in chunks, Transformers allocates a static cache by the width of keys in the configuration.
    """
    layers: list[Any] = cache.layers
    for layer, layer_type in zip(layers, config.layer_types, strict=False):
        allocated = isinstance(layer, StaticLayer) and layer.is_initialized
        if allocated and config.scheme_of(layer_type) == "carope" and layer.keys.shape[-1] == config.head_dim:
            layer.is_initialized = False
