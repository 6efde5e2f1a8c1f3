"""The dtypes in which results of lower precision are computed."""

import torch


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax, norms and long sums over values of `dtype`: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)
