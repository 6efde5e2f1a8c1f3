"""Which differences of float32 results from exact ones are rounding, for the checks of conversions and exports."""

import torch
from torch import Tensor

# Results may differ from exact ones by this many times the rounding error of a computation that is known to be right.
NOISE_MULTIPLE = 16


def rounding_error(rounded: Tensor, exact: Tensor) -> float:
    """The largest error of `rounded` `[...]`, computed in float32; at least one rounding of the largest exact value."""
    return max(largest(rounded - exact), smallest_error(exact))


def smallest_error(values: Tensor) -> float:
    """The error of rounding the largest of `values` `[...]` once to float32, by which any computation may be off."""
    return torch.finfo(torch.float32).eps * largest(values)


def largest(values: Tensor) -> float:
    """The largest magnitude in `values` `[...]`; NaN if there is one."""
    return values.abs().max().item()
