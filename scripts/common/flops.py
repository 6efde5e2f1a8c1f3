"""Floating point operations that a model of this package needs: two for a multiplication with an addition.

Head composition is counted. Masked pairs, recomputation, norms, activations and the softmax are not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from dynattn.families import FAMILIES
from dynattn.modeling.layers.head_composition import DynamicComposition
from dynattn.modeling.layers.headwise_conv import HeadwiseConv

# A backward pass has two products for each one of the forward pass.
TRAINING = 3


@dataclass(frozen=True)
class ModelFlops:
    """What a causal language model computes for a token on its way through, and for what the token attends to.

    Attributes:
        token: FLOPs of one token in all projections, composition generators, convolutions and the head.
        pair: FLOPs of one visible (query, key) pair of one layer, all heads together.
        windows: keys that a token of each layer sees at most; None where that is not bounded.
    """

    token: int
    pair: int
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ModelFlops":
        """Counts a model.

        Raises:
            TypeError: the model is no decoder of this package.
        """
        config, pair = model.config, pair_flops(model.config)
        windows = (config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types)
        return cls(
            token=projection_flops(model) + convolution_flops(model),
            pair=config.num_attention_heads * pair,
            windows=tuple(windows),
        )

    def forward(self, positions: Tensor) -> int:
        """FLOPs of a forward pass with all logits.

        Args:
            positions: `[..., T]`, how many earlier tokens of its document each token may see. Memory is not counted.
        """
        reach = positions + 1
        pairs = sum(int((reach if window is None else reach.clamp(max=window)).sum()) for window in self.windows)
        return positions.numel() * self.token + pairs * self.pair

    def training(self, positions: Tensor) -> int:
        """FLOPs of a forward and a backward pass in which every weight learns, for `positions` `[..., T]`."""
        return TRAINING * self.forward(positions)


def projection_flops(model: nn.Module) -> int:
    """Forward FLOPs of a token in all linear layers and composition generators, without attention and embedding."""
    linear = sum(part.weight.numel() for part in model.modules() if isinstance(part, nn.Linear))
    generated = sum(
        weight.numel()
        for part in model.modules()
        if isinstance(part, DynamicComposition)
        for weight in (part.hidden_weight, part.factor_weight, part.gate_weight)
        if weight is not None
    )
    return 2 * (linear + generated)


def convolution_flops(model: PreTrainedModel) -> int:
    """Forward FLOPs of a token in all convolutions, whose kernels the heads share."""
    kernels = sum(part.weight.numel() for part in model.modules() if isinstance(part, HeadwiseConv))
    return 2 * kernels * model.config.num_attention_heads


def pair_flops(config: Any) -> int:
    """FLOPs of one head for one visible pair: scores, composition of both stages, weighted value.

    Raises:
        TypeError: a configuration of no decoder of this package.
    """
    decoders = [name for name, family in FAMILIES.items() if "AutoModelForCausalLM" in family.heads]
    if config.model_type not in decoders:
        known = ", ".join(decoders)
        raise TypeError(f"operations of {config.model_type!r} are not known; they are for {known}")
    return PAIR_FLOPS[FAMILIES[config.model_type].attention](config)


def relative_pair_flops(config: Any) -> int:
    """Content score, weighted value and, where attention is relative, position score."""
    return (6 if config.is_relative else 4) * config.head_dim


def composed_pair_flops(config: Any) -> int:
    """Score, weighted value, and the composition of each stage."""
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

    Each side has a product with `rank` factors into the hidden maps, one back, and a gate; the static matrix mixes
    `static_heads` heads.
    """
    return sides * (2 * 2 * rank + 2 * gate) + 2 * static_heads


# By the attention op that a family's layers call.
PAIR_FLOPS: Mapping[str, Callable[[Any], int]] = {"dcmha": composed_pair_flops, "relative": relative_pair_flops}
