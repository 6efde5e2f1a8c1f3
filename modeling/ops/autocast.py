"""Autocast, which custom operators have to handle by themselves."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def is_autocast_on(device: torch.device) -> bool:
    """Whether autocast is on for a device; False where there is none, as for `meta`, about which PyTorch raises."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Switches autocast off on a device; does nothing, in no time, where it is off."""
    return torch.autocast(device.type, enabled=False) if is_autocast_on(device) else nullcontext()


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, which are all on one device, in the dtype of autocast if it is on; float64 stays as it is."""
    device = tensors[0].device
    if not is_autocast_on(device):
        return tensors
    dtype = torch.get_autocast_dtype(device.type)
    return tuple(one if one.dtype == torch.float64 else one.to(dtype) for one in tensors)
