"""How far a model's composition is from the identity, measured on its weights."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from ...common.errors import UserError
from ..common.tensor_source import TensorSource
from .new_parameters import COMPOSITION


class Term(NamedTuple):
    """One term of a layer's composition and its largest weight: 0 if it adds nothing, infinity if a weight is NaN."""

    size: float
    layer: int
    stage: str
    name: str


def terms(source: TensorSource, config: Any) -> Iterator[Term]:
    """Every term of every layer. A low-rank term is as large as its second factor, which is zero at an exact start."""
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}{COMPOSITION}"
        dynamic = [(stage, side) for stage in config.compose_stages for side in config.compose_sides]
        if (key := prefix + "factor_weight") in source.headers:
            up = source.read(key)[..., config.compose_rank :, :]  # [G, C, K, R, H/G]
            for index, (stage, side) in enumerate(dynamic):
                yield Term(size_of(up[:, index]), layer, stage, f"{side}-wise low-rank mixing")
        if (key := prefix + "gate_weight") in source.headers:
            gates = source.read(key)  # [E, G, C, H/G]
            for index, (stage, side) in enumerate(dynamic):
                yield Term(size_of(gates[:, :, index]), layer, stage, f"{side}-wise gate")
        if (key := prefix + "static_weight") in source.headers:
            static = source.read(key)  # [P, G, H/G, H/G]
            for index, stage in enumerate(config.compose_stages):
                yield Term(size_of(static[index]), layer, stage, "static mixing")


def size_of(weights: Tensor) -> float:
    """The largest magnitude in `weights` `[...]`; infinite if there is a NaN."""
    return weights.abs().max().nan_to_num(nan=float("inf"), posinf=float("inf")).item()


def require_identity(source: TensorSource, config: Any) -> None:
    """Raises UserError, naming the largest term, where the composition is not exactly the identity."""
    largest = max(terms(source, config), default=None)
    if largest is not None and largest.size > 0:
        raise UserError(
            f"the model composes heads, which the parent cannot: the largest term is the {largest.name} of stage "
            f"{largest.stage!r} in layer {largest.layer}, with weights up to {largest.size:.1e}"
        )
