"""Transforms of functions, as those of `torch.func`, under which the custom operators cannot serve."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad


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
