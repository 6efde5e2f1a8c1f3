"""Rotary position embedding (arXiv 2104.09864), in Transformers' variants and two more, on all or part of a head."""

import copy
import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Variants whose angles depend on the longest row of a batch.
BATCH_DEPENDENT = ("dynamic", "longrope")


class RotaryEmbedding(nn.Module):
    """Cosines and sines of the rotary angles.

    Called with `position_ids` `[B, T]` and any tensor `x` on the device and of the dtype that the result shall have, it
    returns two tensors `[B, T, rotary_dim]`. `rotary_dim` is `head_dim` times the `partial_rotary_factor`. If the
    configuration has a `rotary_dtype`, they have at least that precision.
    """

    inv_freq: Tensor
    original_inv_freq: Tensor

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = rope_parameters(config)["rope_type"]
        if self.rope_type in BATCH_DEPENDENT:
            logger.warning_once(
                f"rope_type {self.rope_type!r} rotates all tokens of a batch by angles that depend on its longest row, "
                "so that scores depend on the batch, as they do in Transformers"
            )
        rotary_dtype = getattr(config, "rotary_dtype", None)
        self.least_dtype: torch.dtype | None = None if rotary_dtype is None else getattr(torch, rotary_dtype)
        inv_freq, self.attention_scaling = inverse_frequencies(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves the buffers to other devices, but never to other dtypes, in which far tokens would get wrong angles."""
        exact = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, moved in list(self.named_buffers(recurse=False)):
            if moved.dtype != exact[name].dtype:
                setattr(self, name, exact[name].to(moved.device))
        return self

    def fill_buffers(self) -> None:
        """Computes the frequencies again, for a model that was allocated without values."""
        inv_freq, _ = inverse_frequencies(self.config)
        init.copy_(self.inv_freq, inv_freq)
        init.copy_(self.original_inv_freq, inv_freq)

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines `[B, T, rotary_dim]` at `position_ids` `[B, T]`; see the class for their dtype."""
        angles = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        angles = torch.cat((angles, angles), dim=-1)
        dtype = x.dtype if self.least_dtype is None else torch.promote_types(x.dtype, self.least_dtype)
        return (angles.cos() * self.attention_scaling).to(dtype), (angles.sin() * self.attention_scaling).to(dtype)


def rope_parameters(config: PreTrainedConfig) -> dict[str, Any]:
    """The rotary parameters of a configuration; one that only has `rope_theta` uses the default variant."""
    return getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": config.rope_theta}


def default_frequencies(config: PreTrainedConfig) -> Tensor:
    """The inverse frequencies `[rotary_dim / 2]` of the default variant."""
    rope = rope_parameters(config)
    rotary_dim = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim
    return 1.0 / rope["rope_theta"] ** exponent


def power_frequencies(config: PreTrainedConfig) -> Tensor:
    """The default frequencies, that of pair `i` times `(1 - 2 i / rotary_dim) ** power_factor` (arXiv 2308.10882)."""
    frequencies = default_frequencies(config)
    place = torch.arange(len(frequencies), dtype=torch.float) / len(frequencies)
    return frequencies * (1 - place) ** rope_parameters(config)["power_factor"]


def truncated_frequencies(config: PreTrainedConfig) -> Tensor:
    """The default frequencies with the low ones replaced (Giraffe, arXiv 2308.10882).

    Frequencies of at least `b = 2 pi / truncate_length`, one turn in the trained length, stay. Those from `b / 8` up to
    `b` become `b / 16`, and lower ones 0, so that their channels carry no position.
    """
    frequencies = default_frequencies(config)
    once = 2 * math.pi / rope_parameters(config)["truncate_length"]
    # `torch.where` of two numbers would have the default dtype, which is bfloat16 while such a model is made.
    slow = torch.where(frequencies >= once / 8, torch.full_like(frequencies, once / 16), 0.0)
    return torch.where(frequencies >= once, frequencies, slow)


# The variants that are computed here; those of Transformers also scale cosines and sines.
OWN_VARIANTS = {"default": default_frequencies, "power": power_frequencies, "truncated": truncated_frequencies}


def inverse_frequencies(config: PreTrainedConfig) -> tuple[Tensor, float]:
    """The inverse frequencies `[rotary_dim / 2]` of a configuration, and the factor on cosines and sines."""
    rope_type = rope_parameters(config)["rope_type"]
    own = OWN_VARIANTS.get(rope_type)
    return ROPE_INIT_FUNCTIONS[rope_type](config) if own is None else (own(config), 1.0)


def rotaries_by_layer_type(config: Any) -> nn.Module | None:
    """The rotary embeddings of a decoder: one module if all layer types that rotate share their `rope_parameters`.

    Otherwise an `nn.ModuleDict` by layer type; None if no layer type rotates by position.
    """
    rotating = rotating_types(config)
    if not rotating:
        return None
    if not config.has_nested_rope:
        return RotaryEmbedding(config)
    return nn.ModuleDict({layer_type: rotary_with(config, config.rope_of(layer_type)) for layer_type in rotating})


def rotating_types(config: Any) -> list[str]:
    """The layer types of a decoder that rotate queries and keys by position, in the order of their names."""
    return [layer_type for layer_type in sorted(set(config.layer_types)) if config.scheme_of(layer_type) == "rope"]


def rotary_with(config: PreTrainedConfig, parameters: dict[str, Any]) -> RotaryEmbedding:
    """The rotary embedding of a model, with these `rope_parameters` in place of those of its configuration."""
    changed = copy.copy(config)
    changed.rope_parameters = parameters
    return RotaryEmbedding(changed)


def rotary_of(module: nn.Module | None, config: Any, layer_type: str) -> RotaryEmbedding | None:
    """The embedding for the layers of a type, out of those of `rotaries_by_layer_type`; None if they do not rotate."""
    if module is None or config.scheme_of(layer_type) != "rope":
        return None
    return module[layer_type] if isinstance(module, nn.ModuleDict) else module  # type: ignore[return-value]


def rotates_layer(config: Any, layer: int) -> bool:
    """Whether a layer takes the rotations that there are for its type: not if `no_rope_layers` leaves it out."""
    rotates = getattr(config, "no_rope_layers", None)
    return rotates is None or bool(rotates[layer])


def rope_types(config: Any) -> list[str | None]:
    """The `rope_type` of each layer type of a decoder that rotates; of a model of Transformers, all that it has."""
    if hasattr(config, "rope_of"):
        return [config.rope_of(layer_type).get("rope_type") for layer_type in rotating_types(config)]
    return _named_rope_types(config)


def _named_rope_types(config: Any) -> list[str | None]:
    """Each `rope_type` that `rope_parameters` name, also of layers that do not rotate."""
    parameters = getattr(config, "rope_parameters", None) or {}  # of all layers, or of each layer type
    return [each.get("rope_type") for each in (parameters, *parameters.values()) if isinstance(each, dict)]


def batch_dependent_rope(config: Any) -> str | None:
    """The first `rope_type` of a decoder whose angles depend on the longest row of a batch; None if none does."""
    return next((rope_type for rope_type in rope_types(config) if rope_type in BATCH_DEPENDENT), None)


def longrope_borders(config: Any) -> list[int]:
    """The lengths beyond which LongRoPE turns all tokens by its long factors, of the layer types that have it.

    Keys that were cached before such a border have the short factors, and do not fit queries behind it.
    """
    # Every step of a generation asks, and looking at each layer type takes long.
    if "longrope" not in _named_rope_types(config) or not hasattr(config, "rope_of"):
        return []
    ropes = (config.rope_of(layer_type) for layer_type in rotating_types(config))
    return [rope["original_max_position_embeddings"] for rope in ropes if rope.get("rope_type") == "longrope"]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first `rotary_dim` dimensions of `x` `[B, H, T, D]`, in the pairs `(i, i + rotary_dim / 2)`.

    `cos` and `sin` are `[B, T, rotary_dim]`, or `[B, H, T, rotary_dim]` if heads have angles of their own. They may be
    more precise than `x`, which then is rotated in their dtype and rounded afterwards.
    """
    if cos.ndim == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotary_dim = cos.shape[-1]
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = rotated.chunk(2, dim=-1)
    rotated = (rotated * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated
