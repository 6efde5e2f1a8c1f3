"""Turns head groups into items: low-rank terms mix heads only inside a group, so kernels can treat each one alone."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..composition import LOW_RANK, Composition


def common_groups(*stages: Composition | None) -> int:
    """Returns the greatest common divisor of the numbers of groups of all stages with low-rank terms, or 1."""
    low_rank = [
        stage.groups
        for stage in stages
        if stage is not None and (stage.query_down is not None or stage.key_down is not None)
    ]
    return math.gcd(*low_rank) or 1


def within_groups(composition: Composition | None, groups: int) -> Composition | None:
    """Returns the same composition with fewer groups and a higher rank, if it has more than `groups` groups.

    A group that is made of several is mixed by the low-rank terms of each, with zeros for the heads of the others:
    factors `[B, T or S, R, H]` become `[B, T or S, R * composition.groups / groups, H]`.

    Args:
        composition: the factors of a stage.
        groups: a divisor of `composition.groups`.
    """
    if composition is None or composition.groups == groups:
        return composition
    factors = {name: getattr(composition, name) for name in LOW_RANK}
    spread: dict[str, Any] = {
        name: _spread(factor, groups, composition.groups // groups)
        for name, factor in factors.items()
        if factor is not None
    }
    return replace(composition, **spread, groups=groups)


def _spread(factor: Tensor, groups: int, parts: int) -> Tensor:
    """Spreads `[B, T or S, R, H]` to `[B, T or S, R * parts, H]`: a factor for each part of a group, zero elsewhere."""
    own = torch.eye(parts, dtype=factor.dtype, device=factor.device)[:, None, :, None]
    split = factor.unflatten(-1, (groups, parts, -1)).unsqueeze(3)  # [B, T or S, R, 1, groups, parts, heads]
    return (split * own).flatten(4).flatten(2, 3)


def split_heads(rows: Tensor, groups: int) -> Tensor:
    """Returns `[B, H, T, D]` as `[B * groups, H / groups, T, D]`; key heads that several groups share are repeated."""
    repeats = groups // math.gcd(groups, rows.shape[1])
    if repeats > 1:  # `repeat_interleave` copies in any case
        rows = rows.repeat_interleave(repeats, dim=1)
    return rows.unflatten(1, (groups, -1)).flatten(0, 1)


def split_factors(terms: Tensor | None, groups: int) -> Tensor | None:
    """Returns `[B, T or S, terms, H]` as `[B * groups, T or S, terms, H / groups]`."""
    if terms is None:
        return None
    return terms.unflatten(-1, (groups, -1)).movedim(-2, 1).flatten(0, 1)


def join_groups(output: Tensor, groups: int) -> Tensor:
    """Returns `[B * groups, T, H / groups, D]` as `[B, T, H, D]`."""
    return output.unflatten(0, (-1, groups)).transpose(1, 2).flatten(2, 3)
