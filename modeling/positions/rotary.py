"""Rotary position embedding (arXiv 2104.09864) in all variants of Transformers, on all or part of a head."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update


class RotaryEmbedding(nn.Module):
    """Cosines and sines of the rotary angles.

    Called with any tensor `x` of the dtype and device that the result shall have, and `position_ids` `[B, T]`, it
    returns two tensors `[B, T, rotary_dim]`. `rotary_dim` is `head_dim` times the `partial_rotary_factor`.
    """

    inv_freq: Tensor

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = rope_parameters(config)["rope_type"]
        init_fn = self.compute_default_rope_parameters
        if self.rope_type != "default":
            init_fn = ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, self.attention_scaling = init_fn(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config: PreTrainedConfig, **_: Any) -> tuple[Tensor, float]:
        """Returns the inverse frequencies `[rotary_dim / 2]` and the factor on cosines and sines, which is 1."""
        rope = rope_parameters(config)
        rotary_dim = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim
        return 1.0 / rope["rope_theta"] ** exponent, 1.0

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines `[B, T, rotary_dim]` at `position_ids` `[B, T]`, in the dtype of `x`."""
        angles = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        angles = torch.cat((angles, angles), dim=-1)
        return (
            (angles.cos() * self.attention_scaling).to(x.dtype),
            (angles.sin() * self.attention_scaling).to(x.dtype),
        )


def rope_parameters(config: PreTrainedConfig) -> dict[str, Any]:
    """The rotary settings of a configuration; one with `rope_theta` alone has the default variant."""
    return getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": config.rope_theta}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first `rotary_dim` dimensions of `x` `[B, H, T, D]`, in the pairs `(i, i + rotary_dim / 2)`.

    `cos` and `sin` are `[B, T, rotary_dim]`.
    """
    rotary_dim = cos.shape[-1]
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated
