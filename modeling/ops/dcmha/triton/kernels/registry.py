"""The table of all kernels by name. Their modules are imported when a device first needs them."""

import os
from functools import cache
from typing import Any

import torch


def load_kernels(device: torch.device) -> dict[str, Any]:
    """Returns all kernels by name.

    Raises:
        ImportError: Triton is not installed.
        ValueError: Triton does not run on `device`.
    """
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"implementation='triton' runs on CUDA devices, not on {device.type!r}; use 'chunked'")
    return _all_kernels()


@cache
def _all_kernels() -> dict[str, Any]:
    """The table, made once: a decoding step of a layer would spend a tenth of its time in Python on these imports."""
    from .decode import DECODE_KERNELS
    from .distance_sums import DISTANCE_KERNELS
    from .head_by_head import HEAD_BY_HEAD_KERNELS
    from .tensor_cores import TENSOR_CORE_KERNELS
    from .window_matmuls import WINDOW_KERNELS

    between = HEAD_BY_HEAD_KERNELS | TENSOR_CORE_KERNELS | DISTANCE_KERNELS
    return between | WINDOW_KERNELS | DECODE_KERNELS
