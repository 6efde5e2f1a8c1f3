"""How `dcmha_chunked` composes a chunk without a compiler: matrix products for queries, in-place steps for keys."""

import torch
from torch import Tensor

from .interface import Composer, Sight, Stage, split_rows


def compose(out: Tensor, maps: Tensor, stage: Stage, scratch: Tensor) -> None:
    """Writes the composition of `maps` `[c, H, n]` to `out`."""
    stage = stage.of_one_item()
    _mix(out, maps, stage, transpose=False)
    if stage.key is None:
        return
    downs, ups, gate = split_rows(stage.key)
    for down, up in zip(downs, ups, strict=True):
        _expand(out, _reduce(maps, down, stage.groups, scratch), up)
    if gate is not None:
        out.addcmul_(maps, gate)


def compose_backward(out: Tensor, gradient: Tensor, maps: Tensor, stage: Stage, sums: Stage, scratch: Tensor) -> None:
    """Writes the gradient of `maps` to `out` and adds those of the factors to `sums`.

    Composition is linear in the maps: its gradient has the same terms with down and up swapped.
    """
    stage, sums = stage.of_one_item(), sums.of_one_item()
    _mix(out, gradient, stage, transpose=True)
    if stage.query is not None or stage.static is not None:
        pairs = torch.bmm(maps, gradient.transpose(1, 2))  # [c, H in, H out]
        if sums.static is not None:
            sums.static.add_(pairs.sum(0))
        if stage.query is not None and sums.query is not None:
            sums.query.add_(_query_gradient(pairs, stage.query, stage.groups))
    if stage.key is not None and sums.key is not None:
        sums.key.add_(_key_gradient(out, gradient, maps, stage.key, stage.groups, scratch))


def softmax(out: Tensor, scores: Tensor, sight: Sight) -> None:
    """Writes the probabilities to `out`; overwrites hidden scores."""
    sight.hide_by_position(scores)
    sight.hide_by_mask(scores)
    torch.softmax(scores, dim=-1, out=out)
    if sight.has_empty_rows():
        out.masked_fill_(scores.amax(-1, keepdim=True) == -torch.inf, 0.0)


def softmax_backward(out: Tensor, gradient: Tensor, probs: Tensor, sight: Sight) -> None:
    """Writes the gradient of the composed scores to `out`."""
    torch.ops.aten._softmax_backward_data.out(gradient, probs, -1, probs.dtype, grad_input=out)


STEPWISE = Composer(compose, compose_backward, softmax, softmax_backward, in_place=False)


def _mix(out: Tensor, maps: Tensor, stage: Stage, *, transpose: bool) -> None:
    """The identity, the static and all query-side terms: one matrix `[H, H]`, indexed [in, out], for each query."""
    if stage.query is None and stage.static is None:
        out.copy_(maps)
        return
    heads = maps.shape[1]
    mixing = torch.eye(heads, dtype=maps.dtype, device=maps.device)
    if stage.static is not None:
        mixing = mixing + stage.static
    if stage.query is not None:
        downs, ups, gate = _split_query(stage.query)
        mixing = mixing + torch.bmm(downs.transpose(1, 2), ups) * same_group(stage.groups, downs)
        if gate is not None:
            mixing = mixing + torch.diag_embed(gate)
    mixing = mixing.expand(maps.shape[0], heads, heads)
    torch.bmm(mixing if transpose else mixing.transpose(1, 2), maps, out=out)


def _query_gradient(pairs: Tensor, rows: Tensor, groups: int) -> Tensor:
    """From the gradient of each query's mixing matrix to that of its rows `[c, rows, H]`."""
    downs, ups, gate = _split_query(rows)
    inside = pairs * same_group(groups, pairs)
    parts = [torch.bmm(ups, inside.transpose(1, 2)), torch.bmm(downs, inside)]
    if gate is not None:
        parts.append(pairs.diagonal(dim1=1, dim2=2).unsqueeze(1))
    return torch.cat(parts, dim=1)


def _key_gradient(out: Tensor, gradient: Tensor, maps: Tensor, rows: Tensor, groups: int, scratch: Tensor) -> Tensor:
    """Adds the key's terms to `out` and returns the gradient of its rows, `[rows, H, n]`."""
    downs, ups, gate = split_rows(rows)
    for_rows = torch.empty_like(rows)
    for index, (down, up) in enumerate(zip(downs, ups, strict=True)):
        hidden = _reduce(gradient, up, groups, scratch)
        _expand(out, hidden, down)
        _sum_over_queries(maps, hidden, scratch, out=for_rows[index])
        hidden = _reduce(maps, down, groups, scratch)
        _sum_over_queries(gradient, hidden, scratch, out=for_rows[len(downs) + index])
    if gate is not None:
        out.addcmul_(gradient, gate)
        torch.sum(torch.mul(maps, gradient, out=scratch), dim=0, out=for_rows[-1])
    return for_rows


def _reduce(maps: Tensor, weights: Tensor, groups: int, scratch: Tensor) -> Tensor:
    """Heads weighted by `weights` `[H, n]` and summed inside each group: `[c, G, 1, n]`."""
    return torch.mul(maps, weights, out=scratch).unflatten(1, (groups, -1)).sum(2, keepdim=True)


def _expand(out: Tensor, hidden: Tensor, weights: Tensor) -> None:
    """Adds each group's hidden map, weighted by `weights` `[H, n]`, to its heads of `out`."""
    groups = hidden.shape[1]
    out.unflatten(1, (groups, -1)).addcmul_(hidden, weights.unflatten(0, (groups, -1)))


def _sum_over_queries(maps: Tensor, hidden: Tensor, scratch: Tensor, *, out: Tensor) -> None:
    """Each head's map times its group's hidden map, summed over the queries, to `out` `[H, n]`."""
    groups = hidden.shape[1]
    torch.mul(maps.unflatten(1, (groups, -1)), hidden, out=scratch.unflatten(1, (groups, -1)))
    torch.sum(scratch, dim=0, out=out)


def _split_query(rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Downs and ups `[c, R, H]`, and the gate `[c, H]`."""
    rank = rows.shape[1] // 2
    return rows[:, :rank], rows[:, rank : 2 * rank], rows[:, -1] if rows.shape[1] % 2 else None


def same_group(groups: int, like: Tensor) -> Tensor | int:
    """`[H, H]`, one where both heads are in one of the groups, else zero; `like` has `H` last."""
    if groups == 1:
        return 1
    heads = like.shape[-1]
    group = torch.arange(heads, device=like.device) // (heads // groups)
    return (group[:, None] == group).to(like.dtype)
