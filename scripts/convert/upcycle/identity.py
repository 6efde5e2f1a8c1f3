"""How far a model's composition is from the identity, measured on its weights."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from dynattn.modeling.layers.head_composition import DynamicComposition

from ...common.errors import UserError
from ..common.tensor_source import TensorSource


class Term(NamedTuple):
    """One term of a layer's composition and its largest weight: 0 if it adds nothing, infinity if a weight is NaN."""

    size: float
    place: str
    stage: str
    name: str


def terms(source: TensorSource, name: str, module: DynamicComposition) -> Iterator[Term]:
    """The terms of one generator. A low-rank one is as large as its second factor, which is zero at an exact start."""
    place = place_of(name)
    dynamic = [(stage, side) for stage in module.stages for side in module.sides]
    if (key := f"{name}.factor_weight") in source.headers:
        up = source.read(key)[..., module.rank :, :]  # [G, C, K, R, H/G]
        for index, (stage, side) in enumerate(dynamic):
            yield Term(size_of(up[:, index]), place, stage, f"{side}-wise low-rank mixing")
    if (key := f"{name}.gate_weight") in source.headers:
        gates = source.read(key)  # [E, G, C, H/G]
        for index, (stage, side) in enumerate(dynamic):
            yield Term(size_of(gates[:, :, index]), place, stage, f"{side}-wise gate")
    if (key := f"{name}.static_weight") in source.headers:
        static = source.read(key)  # [P, G, H/G, H/G]
        for index, stage in enumerate(module.stages):
            yield Term(size_of(static[index]), place, stage, "static mixing")


def place_of(name: str) -> str:
    """Which layer a module belongs to, in words: `layer 3`, in an encoder-decoder `layer 3 of decoder, cross_attn`."""
    match = re.search(r"(?:(encoder|decoder)\.)?layers\.(\d+)\.(\w+)", name)
    if match is None:
        return name
    stack, layer, attention = match.groups()
    return f"layer {layer}" if stack is None else f"layer {layer} of {stack}, {attention}"


def size_of(weights: Tensor) -> float:
    """The largest magnitude in `weights` `[...]`; infinite if there is a NaN."""
    return weights.abs().max().nan_to_num(nan=float("inf"), posinf=float("inf")).item()


def require_identity(source: TensorSource, generators: Mapping[str, DynamicComposition]) -> None:
    """Raises UserError, naming the largest term, where the generators, given by name, do not make the identity."""
    largest = max((term for name, module in generators.items() for term in terms(source, name, module)), default=None)
    if largest is not None and largest.size > 0:
        raise UserError(
            f"the model composes heads, which the parent cannot: the largest term is the {largest.name} of stage "
            f"{largest.stage!r} in {largest.place}, with weights up to {largest.size:.1e}"
        )
