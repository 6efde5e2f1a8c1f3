"""Context-aware rotary embedding (CARoPE, arXiv 2507.23083): rotary frequencies for each head and token from content.

A token has a frequency `f = 1 / (softplus(x W + b) + 1)` for each key head. Pair `i` of a head is turned by its phase,
the sum of `f ** i` over all tokens up to this one. The paper has no `b`: with it the model starts as rotary embedding,
up to the small initial `W`. Query heads take the phases of their key head, so that a cached key needs one phase.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.cache_utils import Cache, StaticLayer


class ContentRotary(nn.Module):
    """The phases of one layer."""

    def __init__(self, hidden_size: int, kv_heads: int, head_dim: int, rope_theta: float) -> None:
        super().__init__()
        self.frequency = nn.Linear(hidden_size, kv_heads)
        self.head_dim, self.rope_theta = head_dim, rope_theta

    @torch.no_grad()
    def init_bias(self) -> None:
        """Makes the frequencies those of rotary embedding where the weights are zero."""
        init.constant_(self.frequency.bias, math.log(math.expm1(self.rope_theta ** (2 / self.head_dim) - 1)))

    def forward(self, hidden_states: Tensor, past: Tensor | None = None) -> Tensor:
        """The phases of new tokens, at least float32 `[B, H_kv, T, D / 2]`.

        Args:
            hidden_states: `[B, T, E]`, normed.
            past: the phases of the last earlier token, `[B, H_kv, 1, D / 2]`.
        """
        logits = self.frequency(hidden_states).transpose(1, 2)[..., None]
        frequency = 1 / (F.softplus(logits.to(torch.promote_types(logits.dtype, torch.float32))) + 1)
        phases = (frequency ** torch.arange(self.head_dim // 2, device=logits.device)).cumsum(2)
        return phases if past is None else phases + past

    def angles(self, phases: Tensor, repeats: int = 1) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[B, H, T, D]` of phases `[B, H_kv, T, D / 2]`, each key head `repeats` times."""
        angles = torch.cat((phases, phases), dim=-1).repeat_interleave(repeats, dim=1)
        return angles.cos(), angles.sin()


def pack_phases(key: Tensor, phases: Tensor) -> Tensor:
    """Keys `[B, H_kv, T, D]` with their phases `[B, H_kv, T, D / 2]` behind them, as a cache layer keeps them.

    Caches keep one dtype and copy bits. So float32 phases lie beside keys in half precision as twice as many numbers.
    """
    return torch.cat([key, phases.contiguous().view(key.dtype)], dim=-1)


def last_phases(cache: Cache | None, layer_idx: int, head_dim: int, dtype: torch.dtype) -> Tensor | None:
    """The phases of the last token in a layer of a cache, `[B, H_kv, 1, D / 2]` in `dtype`; None without tokens.

    Raises:
        ValueError: a cache that changes the bits of what it keeps.
    """
    layer: Any = cache.layers[layer_idx] if cache is not None and layer_idx < len(cache.layers) else None
    if layer is None or not layer.is_initialized:
        return None
    if hasattr(layer, "_quantized_keys"):
        raise ValueError("position_scheme='carope' keeps phases in its cache, which a quantized one would round")
    keys: Tensor = layer.keys
    if not isinstance(layer, StaticLayer):
        return keys[:, :, -1:, head_dim:].contiguous().view(dtype) if keys.shape[2] else None
    # A sliding layer counts in an integer and stops counting in the tensor once it is full.
    count = torch.as_tensor(getattr(layer, "cumulative_length_int", layer.cumulative_length), device=keys.device)
    last = (count.reshape(1).clamp(max=keys.shape[2]) - 1).clamp(min=0)
    phases = keys.index_select(2, last)[..., head_dim:].contiguous().view(dtype)
    return torch.where(count > 0, phases, 0)


def make_room_for_phases(cache: Cache, config: PreTrainedConfig) -> None:
    """Lets layers of `cache` that were allocated for keys alone be allocated again, with room for phases beside them.

    Transformers allocates static caches by the configured width of keys before it reads prompts in chunks.
    """
    layers: list[Any] = cache.layers
    for layer, layer_type in zip(layers, config.layer_types, strict=False):
        allocated = isinstance(layer, StaticLayer) and layer.is_initialized
        if allocated and config.scheme_of(layer_type) == "carope" and layer.keys.shape[-1] == config.head_dim:
            layer.is_initialized = False
