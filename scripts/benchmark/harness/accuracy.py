"""Is a result right? Its error against a float64 truth, next to the error that the reference op makes in that dtype."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# `output` and, after a backward pass, `grad NAME` for every input or parameter.
Results = Mapping[str, Tensor]
# How many times the reference's own error is still rounding: sums in another order reach 4 where terms cancel, while a
# dropped term is off by thousands in float32. The largest deviation is one draw from a long tail, so it gets more room.
RMS_MULTIPLE, LARGEST_MULTIPLE = 6.0, 12.0


@dataclass(frozen=True)
class Error:
    """Root mean square and largest absolute deviation from the truth."""

    rms: float
    largest: float


@dataclass(frozen=True)
class Verdict:
    """Errors of one contestant, relative to the truth; all gradients count as one vector.

    `excess` is the largest error of a single tensor as a multiple of what is allowed, `where` that tensor's name.
    """

    output_error: float
    gradient_error: float | None
    excess: float
    where: str

    @property
    def correct(self) -> bool:
        return self.excess <= 1.0


def judge(results: Results, truth: Results, reference: Results) -> Verdict:
    """Compares `results` with the float64 `truth`; `reference` is what the reference op gives in the dtype measured.

    Every tensor must be within a multiple of the reference's own error, or of epsilon, in both measures. A gradient
    that is zero in theory (of a bias on keys, say) is a sum that cancels: what is left of it is rounding of its terms,
    which are of the size of the largest gradient.
    """
    gradient_scale = max((root_mean_square(truth[name]) for name in truth if name != "output"), default=0.0)
    excesses = {
        name: excess(results.get(name), exact, reference[name], 0.0 if name == "output" else gradient_scale)
        for name, exact in truth.items()
    }
    where = max(excesses, key=lambda name: excesses[name])
    gradients = [name for name in truth if name != "output"]
    return Verdict(
        output_error=relative_error(results, truth, ["output"]),
        gradient_error=relative_error(results, truth, gradients) if gradients else None,
        excess=excesses[where],
        where=where,
    )


def excess(result: Tensor | None, truth: Tensor, reference: Tensor, terms: float = 0.0) -> float:
    """The error of one tensor as a multiple of what is allowed; `terms` is the size of what it may be a sum of."""
    error, own = error_of(result, truth), error_of(reference, truth)
    rounding = torch.finfo(reference.dtype).eps * max(terms, root_mean_square(truth))
    smallest = torch.finfo(reference.dtype).tiny
    return max(
        error.rms / max(own.rms, rounding, smallest) / RMS_MULTIPLE,
        error.largest / max(own.largest, rounding, smallest) / LARGEST_MULTIPLE,
    )


def root_mean_square(tensor: Tensor) -> float:
    """Of the elements of a tensor."""
    return tensor.square().mean().sqrt().item()


def error_of(result: Tensor | None, truth: Tensor) -> Error:
    """The error of `result`; infinite where it is missing, not finite or of another shape."""
    if result is None or result.shape != truth.shape or not result.isfinite().all():
        return Error(math.inf, math.inf)
    deviation = (result.double() - truth).abs()
    return Error(root_mean_square(deviation), deviation.max().item())


def relative_error(results: Results, truth: Results, names: Iterable[str]) -> float:
    """Length of the deviation over length of the truth, of several tensors as one vector."""
    deviation = length = 0.0
    for name in names:
        deviation += error_of(results.get(name), truth[name]).rms ** 2 * truth[name].numel()
        length += truth[name].square().sum().item()
    return math.sqrt(deviation / length) if length else math.inf
