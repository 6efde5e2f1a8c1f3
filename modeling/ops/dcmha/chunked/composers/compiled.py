"""A composer for any device: plain formulas, compiled with `torch.compile`."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .interface import ChunkComposer, StageFactors, split_terms
from .stepwise import STEPWISE

_broken = False


def compose(out: Tensor, maps: Tensor, factors: StageFactors, scratch: Tensor) -> None:
    """Writes the composition of `maps` `[c, H, n]` to `out` `[c, H, n]`."""
    base = _mix_static(maps, factors.static, scratch)
    if _run(_compose, (out, maps, base), factors) is _FAILED:
        STEPWISE.compose(out, maps, factors, scratch)


def compose_backward(
    out: Tensor, gradient: Tensor, maps: Tensor, factors: StageFactors, sums: StageFactors, scratch: Tensor
) -> None:
    """Writes the gradient of `maps` to `out`, all `[c, H, n]`, and adds those of the factors to `sums`."""
    base = _mix_static(gradient, None if factors.static is None else factors.static.t(), scratch)
    terms = _run(_compose_backward, (out, gradient, maps, base), factors)
    if terms is _FAILED:
        STEPWISE.compose_backward(out, gradient, maps, factors, sums, scratch)
        return
    if sums.query is not None:
        sums.query.add_(torch.stack(terms[0], dim=1))
    if sums.key is not None:
        sums.key.add_(torch.stack(terms[1]))
    if sums.static is not None:
        sums.static.add_(torch.bmm(maps, gradient.transpose(1, 2)).sum(0))


COMPILED = ChunkComposer(compose, compose_backward)
_FAILED = object()


def _mix_static(maps: Tensor, static: Tensor | None, scratch: Tensor) -> Tensor:
    """`maps` `[c, H, n]` plus their product with `static` `[H, H]`, indexed [in, out]; in `scratch` `[c, H, n]`."""
    if static is None:
        return maps
    matrix = (static + torch.eye(len(static), dtype=static.dtype, device=static.device)).t()
    return torch.bmm(matrix.expand(maps.shape[0], -1, -1), maps, out=scratch)


def _compose(out: Tensor, maps: Tensor, base: Tensor, query: Tensor | None, key: Tensor | None, groups: int) -> None:
    """Writes the composition of `maps` to `out`: `base`, plus what all terms but the static matrix make of `maps`.

    Args:
        out, maps, base: `[c, H, n]`.
        query, key: packed terms `[c, terms, H]` and `[terms, H, n]`.
    """
    grouped, result = maps.unflatten(1, (groups, -1)), base.unflatten(1, (groups, -1))  # [c, G, H/G, n]
    for downs, ups, gate, _ in _sides(query, key, groups):
        for down, up in zip(downs, ups, strict=True):
            result = result + (grouped * down).sum(2, keepdim=True) * up
        if gate is not None:
            result = result + grouped * gate
    out.copy_(result.flatten(1, 2))


def _compose_backward(
    out: Tensor,
    gradient: Tensor,
    maps: Tensor,
    base: Tensor,
    query: Tensor | None,
    key: Tensor | None,
    groups: int,
) -> list[list[Tensor]]:
    """Writes the gradient of `maps` to `out`; other arguments as for `_compose`.

    Args:
        gradient: of the composition, `[c, H, n]`.
        base: what the static matrix and the identity contribute to the result.

    Returns:
        The gradients of the query terms, `[c, H]` each, and of the key terms, `[H, n]` each.
    """
    grouped, result = maps.unflatten(1, (groups, -1)), base.unflatten(1, (groups, -1))  # [c, G, H/G, n]
    upper = gradient.unflatten(1, (groups, -1))
    gradients: list[list[Tensor]] = [[], []]
    for downs, ups, gate, dim in _sides(query, key, groups):
        for_downs, for_ups, for_gate = [], [], []
        for down, up in zip(downs, ups, strict=True):
            hidden = (upper * up).sum(2, keepdim=True)
            result = result + hidden * down
            for_downs.append((grouped * hidden).sum(dim))
            for_ups.append((upper * (grouped * down).sum(2, keepdim=True)).sum(dim))
        if gate is not None:
            result = result + upper * gate
            for_gate.append((grouped * upper).sum(dim))
        group_dim = 1 if dim == 3 else 0  # where the groups are in the sums, which have lost dimension `dim`
        terms = [term.flatten(group_dim, group_dim + 1) for term in (*for_downs, *for_ups, *for_gate)]
        gradients[0 if dim == 3 else 1] = terms
    out.copy_(result.flatten(1, 2))
    return gradients


def _sides(query: Tensor | None, key: Tensor | None, groups: int) -> list[tuple[Any, Any, Any, int]]:
    """Splits the terms `[c, terms, H]` of queries and `[terms, H, n]` of keys.

    Returns:
        For each side its down terms, its up terms and its gate, all of which broadcast to `[c, G, H/G, n]`, and the
        dimension along which they are constant.
    """
    sides = []
    if query is not None:
        sides.append((*split_terms(query.unflatten(-1, (groups, -1)).unsqueeze(-1), dim=1), 3))
    if key is not None:
        sides.append((*split_terms(key.unflatten(1, (groups, -1)).unsqueeze(1)), 0))
    return sides


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _run(function: Callable[..., Any], maps: tuple[Tensor, ...], factors: StageFactors) -> Any:
    """Calls `function`, compiled for any number of keys `n`, on `maps` `[c, H, n]` and the factors.

    Returns:
        What `function` returns, or `_FAILED` if it cannot be compiled.
    """
    global _broken
    if _broken:
        return _FAILED
    for tensor in (*maps, factors.key):
        if tensor is not None:
            torch._dynamo.mark_dynamic(tensor, 2)
    try:
        return _compiled(function)(*maps, factors.query, factors.key, factors.groups)
    except Exception as error:  # a compiler can fail in any way, and there is an answer without it
        _broken = True
        warnings.warn(f"composing without torch.compile, which failed: {error}", stacklevel=2)
        return _FAILED
