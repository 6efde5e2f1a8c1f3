"""Modes of PyTorch that an op has to handle by itself: autocast and transforms of functions."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


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


def under_transforms(definition: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates an op so that calls under function transforms go to `definition`, ordinary PyTorch operators.

    Those are calls inside `torch.func.grad`, `vmap`, `jvp` and the like, and inside `forward_ad.dual_level`. The op, a
    custom operator, only has a backward pass: it would silently drop tangents, for example.

    Args:
        definition: takes the same arguments as the op.
    """

    def decorate(op: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(op)
        def call(*arguments: Any, **options: Any) -> Any:
            return (definition if _is_transformed() else op)(*arguments, **options)

        return call

    return decorate


def _is_transformed() -> bool:
    """Whether a function transform or a level of forward-mode derivatives is active."""
    return are_transforms_active() or forward_ad._current_level >= 0


@torch.compiler.assume_constant_result
def are_transforms_active() -> bool:
    """Whether a function transform of `torch.func` is active.

    A constant for `torch.compile`, which asks while it traces and traces again when other transforms are active.
    """
    return torch._C._are_functorch_transforms_active()
