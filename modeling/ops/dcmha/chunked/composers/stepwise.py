"""The composer that needs no compiler: `composed[i, :, j] = maps[i, :, j] @ (I + static + M_query[i] + M_key[j])`.

The first three summands are one matrix [in, out] for each query, applied in a batched matrix product. The terms of
`M_key`, low-rank and gate, differ from key to key and are applied one by one, in place.
"""

import torch
from torch import Tensor

from .interface import ChunkComposer, StageFactors, split_terms


def compose(out: Tensor, maps: Tensor, factors: StageFactors, scratch: Tensor) -> None:
    """Writes the composition of `maps` `[c, H, n]` to `out` `[c, H, n]`."""
    _mix(out, maps, factors, transpose=False)
    if factors.key is None:
        return
    downs, ups, gate = split_terms(factors.key)
    for down, up in zip(downs, ups, strict=True):
        _expand(out, _reduce(maps, down, factors.groups, scratch), up)
    if gate is not None:
        out.addcmul_(maps, gate)


def compose_backward(
    out: Tensor, gradient: Tensor, maps: Tensor, factors: StageFactors, sums: StageFactors, scratch: Tensor
) -> None:
    """Writes the gradient of `maps` to `out`, all `[c, H, n]`, and adds those of the factors to `sums`.

    Composition is linear in the maps: its gradient has the same terms with down and up swapped.
    """
    _mix(out, gradient, factors, transpose=True)
    if factors.query is not None or factors.static is not None:
        pairs = torch.bmm(maps, gradient.transpose(1, 2))  # [c, H in, H out]
        if sums.static is not None:
            sums.static.add_(pairs.sum(0))
        if factors.query is not None and sums.query is not None:
            sums.query.add_(_query_gradient(pairs, factors.query, factors.groups))
    if factors.key is not None and sums.key is not None:
        sums.key.add_(_key_gradient(out, gradient, maps, factors.key, factors.groups, scratch))


STEPWISE = ChunkComposer(compose, compose_backward)


def _mix(out: Tensor, maps: Tensor, factors: StageFactors, *, transpose: bool) -> None:
    """Writes the product of each query's matrix with its `maps` `[c, H, n]` to `out` `[c, H, n]`.

    A query's matrix `[H, H]`, indexed [in, out], is the sum of the identity, the static matrix and its own low-rank and
    gate terms. With `transpose` the matrices are applied as [out, in], which gives the gradient.
    """
    if factors.query is None and factors.static is None:
        out.copy_(maps)
        return
    heads = maps.shape[1]
    matrices = torch.eye(heads, dtype=maps.dtype, device=maps.device)
    if factors.static is not None:
        matrices = matrices + factors.static
    if factors.query is not None:
        downs, ups, gate = _split_query(factors.query)
        matrices = matrices + torch.bmm(downs.transpose(1, 2), ups) * same_group(factors.groups, downs)
        if gate is not None:
            matrices = matrices + torch.diag_embed(gate)
    matrices = matrices.expand(maps.shape[0], heads, heads)
    torch.bmm(matrices if transpose else matrices.transpose(1, 2), maps, out=out)


def _query_gradient(pairs: Tensor, terms: Tensor, groups: int) -> Tensor:
    """The gradient of the queries' `terms` `[c, terms, H]`, from that of their matrices, `pairs` `[c, H in, H out]`."""
    downs, ups, gate = _split_query(terms)
    inside = pairs * same_group(groups, pairs)
    parts = [torch.bmm(ups, inside.transpose(1, 2)), torch.bmm(downs, inside)]
    if gate is not None:
        parts.append(pairs.diagonal(dim1=1, dim2=2).unsqueeze(1))
    return torch.cat(parts, dim=1)


def _key_gradient(out: Tensor, gradient: Tensor, maps: Tensor, terms: Tensor, groups: int, scratch: Tensor) -> Tensor:
    """Adds what the keys' `terms` `[terms, H, n]` contribute to the gradient of `maps`, to `out` `[c, H, n]`.

    Returns:
        The gradient of `terms`.
    """
    downs, ups, gate = split_terms(terms)
    for_terms = torch.empty_like(terms)
    for index, (down, up) in enumerate(zip(downs, ups, strict=True)):
        hidden = _reduce(gradient, up, groups, scratch)
        _expand(out, hidden, down)
        _sum_over_queries(maps, hidden, scratch, out=for_terms[index])
        hidden = _reduce(maps, down, groups, scratch)
        _sum_over_queries(gradient, hidden, scratch, out=for_terms[len(downs) + index])
    if gate is not None:
        out.addcmul_(gradient, gate)
        torch.sum(torch.mul(maps, gradient, out=scratch), dim=0, out=for_terms[-1])
    return for_terms


def _reduce(maps: Tensor, weights: Tensor, groups: int, scratch: Tensor) -> Tensor:
    """`maps` `[c, H, n]`, weighted by `weights` `[H, n]` and summed over the heads of each group: `[c, G, 1, n]`."""
    return torch.mul(maps, weights, out=scratch).unflatten(1, (groups, -1)).sum(2, keepdim=True)


def _expand(out: Tensor, hidden: Tensor, weights: Tensor) -> None:
    """Adds `hidden` `[c, G, 1, n]`, weighted by `weights` `[H, n]`, to the heads of each group in `out` `[c, H, n]`."""
    groups = hidden.shape[1]
    out.unflatten(1, (groups, -1)).addcmul_(hidden, weights.unflatten(0, (groups, -1)))


def _sum_over_queries(maps: Tensor, hidden: Tensor, scratch: Tensor, *, out: Tensor) -> None:
    """Writes `maps` `[c, H, n]` times their group's `hidden` `[c, G, 1, n]`, summed over queries, to `out` `[H, n]`."""
    groups = hidden.shape[1]
    torch.mul(maps.unflatten(1, (groups, -1)), hidden, out=scratch.unflatten(1, (groups, -1)))
    torch.sum(scratch, dim=0, out=out)


def _split_query(terms: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Splits `[c, terms, H]` into down and up terms, `[c, R, H]` each, and the gate `[c, H]`, if any."""
    rank = terms.shape[1] // 2
    return terms[:, :rank], terms[:, rank : 2 * rank], terms[:, -1] if terms.shape[1] % 2 else None


def same_group(groups: int, like: Tensor) -> Tensor | int:
    """`[H, H]`, 1 where both heads are in the same group, else 0; or just 1 if there is one group.

    Args:
        like: `[..., H]`, which gives `H`, dtype and device.
    """
    if groups == 1:
        return 1
    heads = like.shape[-1]
    group = torch.arange(heads, device=like.device) // (heads // groups)
    return (group[:, None] == group).to(like.dtype)
