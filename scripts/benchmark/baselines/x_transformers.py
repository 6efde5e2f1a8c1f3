"""Baseline: talking heads of the package x-transformers, for whoever has installed it.

It computes the same function as ours with static matrices alone, on maps of all pairs of tokens.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ..harness.inputs import OpInputs


def is_installed() -> bool:
    """Whether the package is there; nothing of it is imported."""
    return find_spec("x_transformers") is not None


@cache
def talking_heads(heads: int) -> nn.Module:
    """The module that attends from queries, keys and values `[B, H, T, D]`; its two matrices are the caller's."""
    from x_transformers.attend import Attend

    module: nn.Module = Attend(heads=heads, causal=True, pre_talking_heads=True, post_talking_heads=True)
    return module


def attend(inputs: OpInputs) -> Tensor:
    """Causal attention with the static matrices of `inputs`. Returns `[B, T, H, D]`.

    Raises:
        ValueError: there is a window, which the module has not.
    """
    if inputs.window is not None:
        raise ValueError("x-transformers' talking heads have no sliding window")
    assert inputs.pre is not None and inputs.post is not None
    assert inputs.pre.static is not None and inputs.post.static is not None
    post = inputs.post.static
    identity = torch.eye(len(post), dtype=post.dtype, device=post.device)
    # Convolutions over one pair; the module adds the scores to what the first one makes of them.
    weights: dict[str, Any] = {
        "pre_softmax_talking_heads.weight": inputs.pre.static.t()[..., None, None],
        "post_softmax_talking_heads.weight": (post + identity).t()[..., None, None],
    }
    heads = (inputs.query, inputs.key, inputs.value)
    output, _ = torch.func.functional_call(talking_heads(len(post)), weights, heads)
    return output.transpose(1, 2)
