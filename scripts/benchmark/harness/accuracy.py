"""Compares the error of results with the error that the reference op makes in the same dtype."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ...common.atomic_file import without_nan

# `output` and, after a backward pass, `grad NAME` for every input or parameter.
Results = Mapping[str, Tensor]
# The multiples of the reference op's own error that still count as rounding. Summing in another order reaches 4 where
# terms cancel, while a dropped term is off by thousands in float32. The largest deviation is a single draw from a long
# tail, so its limit is higher.
RMS_MULTIPLE, LARGEST_MULTIPLE = 6.0, 12.0


def with_gradients(output: Tensor, leaves: Mapping[str, Tensor], cotangent: Tensor) -> Results:
    """The results of a forward and a backward pass: the output, and the gradient of every leaf, by name."""
    gradients = torch.autograd.grad(output, list(leaves.values()), cotangent)
    return {"output": output.detach(), **{f"grad {name}": one for name, one in zip(leaves, gradients, strict=True)}}


@dataclass(frozen=True)
class Deviation:
    """Root mean square and largest absolute difference from the exact values."""

    rms: float
    largest: float


@dataclass(frozen=True)
class Verdict:
    """Relative errors of one candidate.

    Attributes:
        output_error, gradient_error: norm of the deviation over norm of the exact values; all gradients count as one
            vector.
        excess: the largest error of a single tensor as a multiple of the limit.
        where: the name of that tensor.
    """

    output_error: float
    gradient_error: float | None
    excess: float
    where: str

    @property
    def correct(self) -> bool:
        return self.excess <= 1.0

    def as_record(self) -> dict[str, Any]:
        """As JSON keeps it: an error of results that are not finite is None."""
        return without_nan(asdict(self))


def judge(results: Results, exact: Results, reference: Results) -> Verdict:
    """Compares `results` with what the reference op gives in float64 (`exact`) and in the measured dtype (`reference`).

    Every tensor must be within a multiple of the reference's own error, or of epsilon, in both measures. A gradient
    that is zero in theory (of a bias on keys, for example) is a sum that cancels: what remains is rounding of its
    terms, which are of the size of the largest gradient.

    Raises:
        FloatingPointError: a tensor of the reference op is not finite, so that no error can be told from its own.
    """
    check_finite(exact, reference)
    gradients = [name for name in exact if name != "output"]
    gradient_scale = max((root_mean_square(exact[name]) for name in gradients), default=0.0)
    excesses = {
        name: excess(results.get(name), tensor, reference[name], 0.0 if name == "output" else gradient_scale)
        for name, tensor in exact.items()
    }
    where = max(excesses, key=lambda name: excesses[name])
    return Verdict(
        output_error=relative_error(results, exact, ["output"]),
        gradient_error=relative_error(results, exact, gradients) if gradients else None,
        excess=excesses[where],
        where=where,
    )


def check_finite(exact: Results, reference: Results) -> None:
    """Raises FloatingPointError unless the reference op gives finite tensors, in float64 and in the measured dtype."""
    for name, tensor in exact.items():
        for given in (tensor, reference[name]):
            if not given.isfinite().all():
                dtype = str(given.dtype).removeprefix("torch.")
                raise FloatingPointError(
                    f"{name} of the reference op is not finite in {dtype}, so that nothing can be compared with it; "
                    "give a dtype with a larger range, or shorter sequences"
                )


def excess(result: Tensor | None, exact: Tensor, reference: Tensor, terms: float) -> float:
    """The error of one `[...]` tensor over its limit; `terms` is the size of the terms that are summed in it."""
    error, own = deviation_of(result, exact), deviation_of(reference, exact)
    rounding = torch.finfo(reference.dtype).eps * max(terms, root_mean_square(exact))
    smallest = torch.finfo(reference.dtype).tiny
    return max(
        error.rms / max(own.rms, rounding, smallest) / RMS_MULTIPLE,
        error.largest / max(own.largest, rounding, smallest) / LARGEST_MULTIPLE,
    )


def root_mean_square(tensor: Tensor) -> float:
    """Over all elements of `[...]`."""
    return tensor.square().mean().sqrt().item()


def deviation_of(result: Tensor | None, exact: Tensor) -> Deviation:
    """The deviation of a `[...]` result; infinite if it is missing, not finite, or of another shape than `exact`."""
    if result is None or result.shape != exact.shape or not result.isfinite().all():
        return Deviation(math.inf, math.inf)
    difference = (result.double() - exact).abs()
    return Deviation(root_mean_square(difference), difference.max().item())


def relative_error(results: Results, exact: Results, names: Iterable[str]) -> float:
    """Norm of the deviation over norm of the exact values, several tensors counting as one vector."""
    squared_deviation = squared_norm = 0.0
    for name in names:
        squared_deviation += deviation_of(results.get(name), exact[name]).rms ** 2 * exact[name].numel()
        squared_norm += exact[name].square().sum().item()
    return math.sqrt(squared_deviation / squared_norm) if squared_norm else math.inf
