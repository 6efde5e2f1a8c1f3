"""Floating point operations (FLOPs) of the models of this package; a multiplication with an addition counts as two.

Head composition is counted. Masked pairs, recomputation, norms, activations and the softmax are not.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dynattn.families import FAMILIES, Family, family_of
from dynattn.modeling.common.encoder_heads import PooledClassificationHead
from dynattn.modeling.common.layer_types import layer_types_of
from dynattn.modeling.layers.head_composition import DynamicComposition
from dynattn.modeling.layers.headwise_conv import HeadwiseConv
from dynattn.modeling.layers.image_embeddings import ImageEmbeddings
from dynattn.modeling.modeling_dcvit import DCViTForImageClassification

# Training costs this many forward passes: the backward pass has two matrix products for each one of the forward pass.
TRAINING = 3


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a decoder or an encoder, per token and per pair of tokens.

    Attributes:
        token: FLOPs of one token in all projections, composition generators and convolutions.
        output: FLOPs of one token in what makes its logits, and in a head that reads every token.
        pair: FLOPs of one visible (query, key) pair of one layer, all heads together.
        windows: for each layer, the most keys that a token sees, or None without a limit. In a decoder they are the
            token itself and earlier ones; in an encoder the number holds on either side, the token not counted.
        is_causal: whether tokens see only themselves and earlier ones.
        row: FLOPs of a row of the batch beside those of its tokens, such as a classifier's on the pooled row.
    """

    token: int
    output: int
    pair: int
    windows: tuple[int | None, ...]
    is_causal: bool = True
    row: int = 0

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ModelFlops":
        """Counts a decoder, or an encoder of text or images.

        Raises:
            TypeError: the model is an encoder-decoder, or of a family that is not in this package.
        """
        config, family = model.config, check_known(model.config)
        outputs = projection_flops(model) - projection_flops(model.base_model)
        images = getattr(model.base_model, "embeddings", None)
        patch = 2 * images.patch_embeddings.weight.numel() if isinstance(images, ImageEmbeddings) else 0
        kernels = sum(part.weight.numel() for part in model.modules() if isinstance(part, HeadwiseConv))
        convolutions = 2 * kernels * config.num_attention_heads  # the heads share the kernels
        reads_rows = isinstance(model, PooledClassificationHead | DCViTForImageClassification)
        return cls(
            token=projection_flops(model.base_model) + convolutions + patch,
            output=0 if reads_rows else outputs,
            pair=config.num_attention_heads * PAIR_FLOPS[family.attention](config),
            windows=tuple(
                config.sliding_window if kind == "sliding_attention" else None for kind in layer_types_of(config)
            ),
            is_causal="AutoModelForCausalLM" in family.heads,
            # `token` counts the patch projection for every token, but prefix tokens (such as [CLS]) do not use it.
            row=outputs * reads_rows - patch * getattr(config, "num_prefix_tokens", 0),
        )

    def forward(self, positions: Tensor, outputs: int | None = None) -> int:
        """FLOPs of a forward pass.

        Args:
            positions: `[..., T]`, how many earlier tokens of its document each token has. Memory is not counted.
            outputs: how many tokens get logits; all by default.
        """
        rows = positions.numel() // positions.shape[-1] if positions.numel() else 0
        outputs = positions.numel() if outputs is None else outputs
        pairs = sum(self.pairs(positions, window) for window in self.windows)
        return positions.numel() * self.token + outputs * self.output + pairs * self.pair + rows * self.row

    def pairs(self, positions: Tensor, window: int | None) -> int:
        """Visible pairs of a layer for `positions` `[..., T]`."""
        limit = sys.maxsize if window is None else window
        if self.is_causal:
            return int((positions + 1).clamp(max=limit).sum())
        seen = positions.clamp(max=limit) + later_tokens(positions).clamp(max=limit) + 1
        return int(seen.sum())

    def training(self, positions: Tensor, outputs: int | None = None) -> int:
        """FLOPs of a forward and a backward pass in which every weight learns, for `positions` `[..., T]`."""
        return TRAINING * self.forward(positions, outputs)


def later_tokens(positions: Tensor) -> Tensor:
    """How many later tokens of its document each token has, from positions `[..., T]`, which count earlier ones."""
    length = positions.shape[-1]
    index = torch.arange(length, device=positions.device)
    is_last = torch.ones_like(positions, dtype=torch.bool)
    is_last[..., :-1] = positions[..., 1:] <= positions[..., :-1]
    ends = torch.where(is_last, index, length).flip(-1).cummin(-1).values.flip(-1)
    return ends - index


def projection_flops(module: nn.Module) -> int:
    """Forward FLOPs of a token in all linear layers and composition generators, without attention and embedding."""
    linear = sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))
    generated = sum(
        weight.numel()
        for part in module.modules()
        if isinstance(part, DynamicComposition)
        for weight in (part.hidden_weight, part.factor_weight, part.gate_weight)
        if weight is not None
    )
    return 2 * (linear + generated)


def check_known(config: Any) -> Family:
    """The family of a configuration.

    Raises:
        TypeError: the configuration is of an encoder-decoder, or of no family of this package.
    """
    known = {name: one for name, one in FAMILIES.items() if "AutoModelForSeq2SeqLM" not in one.heads}
    family = family_of(config)
    if family is None or family.model_type not in known:
        raise TypeError(f"operations of {config.model_type!r} are not known; they are for {', '.join(known)}")
    return family


def relative_pair_flops(config: Any) -> int:
    """FLOPs of content score, weighted value and, where attention is relative, position score."""
    return (6 if config.is_relative else 4) * config.head_dim


def composed_pair_flops(config: Any) -> int:
    """FLOPs of score, weighted value, and the composition of each stage."""
    difference = 2 * config.num_attention_heads if config.differential_heads else 0  # a static matrix of all heads
    stage = stage_flops(
        sides=len(config.compose_sides),
        rank=config.compose_rank if config.compose_low_rank else 0,
        gate=config.compose_gate,
        static_heads=config.num_attention_heads // config.compose_groups if config.compose_static else 0,
    )
    return 4 * config.head_dim + len(config.compose_stages) * stage + difference


def stage_flops(*, sides: int, rank: int, gate: bool, static_heads: int) -> int:
    """FLOPs of one composition stage for one head of one pair.

    Each of `sides` (query, key) projects the heads to `rank` hidden maps and back, and may have a gate. A static matrix
    mixes `static_heads` heads; 0 means that there is none.
    """
    return sides * (2 * 2 * rank + 2 * gate) + 2 * static_heads


# FLOPs of one head for one visible pair, for each attention op that a family's layers can call (`Family.attention`).
PAIR_FLOPS: Mapping[str, Callable[[Any], int]] = {
    "dcmha": composed_pair_flops,
    "relative": relative_pair_flops,
}
