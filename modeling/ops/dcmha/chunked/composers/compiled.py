"""How `dcmha_chunked` composes a chunk with `torch.compile`."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .interface import Composer, Stage, split_rows
from .stepwise import STEPWISE

_broken = False


def compose(out: Tensor, maps: Tensor, stage: Stage, scratch: Tensor) -> None:
    """Writes the composition of `maps` `[c, H, n]` to `out`."""
    base = _mix_static(maps, stage.static, scratch)
    if _run(_compose, (out, maps, base), stage) is _FAILED:
        STEPWISE.compose(out, maps, stage, scratch)


def compose_backward(out: Tensor, gradient: Tensor, maps: Tensor, stage: Stage, sums: Stage, scratch: Tensor) -> None:
    """Writes the gradient of `maps` to `out` and adds those of the factors to `sums`."""
    base = _mix_static(gradient, None if stage.static is None else stage.static.t(), scratch)
    rows = _run(_compose_backward, (out, gradient, maps, base), stage)
    if rows is _FAILED:
        STEPWISE.compose_backward(out, gradient, maps, stage, sums, scratch)
        return
    sums = sums.of_one_item()
    if sums.query is not None:
        sums.query.add_(torch.stack(rows[0], dim=1))
    if sums.key is not None:
        sums.key.add_(torch.stack(rows[1]))
    if sums.static is not None:
        sums.static.add_(torch.bmm(maps, gradient.transpose(1, 2)).sum(0))


FUSED = Composer(compose, compose_backward, STEPWISE.softmax, STEPWISE.softmax_backward, in_place=False)
_FAILED = object()


def _mix_static(maps: Tensor, static: Tensor | None, scratch: Tensor) -> Tensor:
    """The maps themselves plus what a static matrix, indexed [in, out], makes of them."""
    if static is None:
        return maps
    mixing = (static + torch.eye(len(static), dtype=static.dtype, device=static.device)).t()
    return torch.bmm(mixing.expand(maps.shape[0], -1, -1), maps, out=scratch)


def _compose(out: Tensor, maps: Tensor, base: Tensor, query: Tensor | None, key: Tensor | None, groups: int) -> None:
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
    """Returns the gradients of the query rows, `[c, H]` each, and of the key rows, `[H, n]` each."""
    grouped, result = maps.unflatten(1, (groups, -1)), base.unflatten(1, (groups, -1))
    upper = gradient.unflatten(1, (groups, -1))
    gradients: list[list[Tensor]] = [[], []]
    for downs, ups, gate, axis in _sides(query, key, groups):
        for_downs, for_ups, for_gate = [], [], []
        for down, up in zip(downs, ups, strict=True):
            hidden = (upper * up).sum(2, keepdim=True)
            result = result + hidden * down
            for_downs.append((grouped * hidden).sum(axis))
            for_ups.append((upper * (grouped * down).sum(2, keepdim=True)).sum(axis))
        if gate is not None:
            result = result + upper * gate
            for_gate.append((grouped * upper).sum(axis))
        heads = 1 if axis == 3 else 0  # where the group and the head of a group are, once `axis` is gone
        rows = [row.flatten(heads, heads + 1) for row in (*for_downs, *for_ups, *for_gate)]
        gradients[0 if axis == 3 else 1] = rows
    out.copy_(result.flatten(1, 2))
    return gradients


def _sides(query: Tensor | None, key: Tensor | None, groups: int) -> list[tuple[Any, Any, Any, int]]:
    """For each side its downs, ups and gate, as factors of `[c, G, H/G, n]`, and the axis that they are constant on."""
    sides = []
    if query is not None:
        sides.append((*split_rows(query.unflatten(-1, (groups, -1)).unsqueeze(-1), dim=1), 3))
    if key is not None:
        sides.append((*split_rows(key.unflatten(1, (groups, -1)).unsqueeze(1)), 0))
    return sides


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _run(function: Callable[..., Any], maps: tuple[Tensor, ...], stage: Stage) -> Any:
    """Calls a compiled function, made for any number of keys; returns `_FAILED` if there is no compiling it."""
    global _broken
    if _broken:
        return _FAILED
    stage = stage.of_one_item()
    for tensor in (*maps, stage.key):
        if tensor is not None:
            torch._dynamo.mark_dynamic(tensor, 2)
    try:
        return _compiled(function)(*maps, stage.query, stage.key, stage.groups)
    except Exception as error:
        _broken = True
        warnings.warn(f"composing without torch.compile, which failed: {error}", stacklevel=2)
        return _FAILED
