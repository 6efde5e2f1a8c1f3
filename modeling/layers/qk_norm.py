"""Norms of the heads of queries and keys (QK-norm), before any rotation."""

from torch import Tensor, nn
from transformers import PreTrainedConfig

from .rms_norm import RMSNorm


def make_head_norm(config: PreTrainedConfig, heads: int) -> nn.Module:
    """The norm of the queries or keys of so many heads, as configured."""
    if config.qk_norm_type == "joint_rms_norm":
        return JointRMSNorm(heads, config.head_dim, config.qk_norm_eps)
    if config.qk_norm_type == "layer_norm":
        return nn.LayerNorm(config.head_dim, config.qk_norm_eps, bias=False)
    return RMSNorm(config.head_dim, config.qk_norm_eps)


class JointRMSNorm(RMSNorm):
    """`RMSNorm` of all heads of a token together, with a scale for each of their dimensions (OLMo 2)."""

    def __init__(self, heads: int, head_dim: int, eps: float) -> None:
        super().__init__(heads * head_dim, eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes heads `[..., H, D]`."""
        return super().forward(x.flatten(-2)).unflatten(-1, x.shape[-2:])
