"""How much a composition mixes heads: its matrix for a pair of tokens, the size of its terms, how alike heads are."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from dynattn.modeling.ops.dcmha.chunked.composers.stepwise import same_group
from dynattn.modeling.ops.dcmha.composition import SIDES, Composition

# The fields of `Composition` that make each term.
TERMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "query_low_rank": ("query_down", "query_up"),
        "key_low_rank": ("key_down", "key_up"),
        "query_gate": ("query_gate",),
        "key_gate": ("key_gate",),
        "static": ("static",),
    }
)


def term_matrices(stage: Composition) -> dict[str, Tensor]:
    """The matrix that each present term adds to the identity, indexed [in, out].

    Terms of the query are `[B, T, H, H]`, those of the key `[B, S, H, H]`, `static` is `[1, 1, H, H]`.
    """
    matrices = {}
    for side in SIDES:
        down, up, gate = stage.side(side)
        if down is not None and up is not None:
            mixed = torch.einsum("btrn,btrm->btnm", down, up)
            matrices[f"{side}_low_rank"] = mixed * same_group(stage.groups, mixed)
        if gate is not None:
            matrices[f"{side}_gate"] = torch.diag_embed(gate)
    if stage.static is not None:
        matrices["static"] = stage.static[None, None]
    return matrices


def pair_matrices(stage: Composition) -> Tensor:
    """The matrix that mixes the heads of each pair, identity included: `[B, T, S, H, H]` indexed [in, out].

    `T` or `S` is 1 if all queries or all keys have the same matrix.
    """
    terms = term_matrices(stage)
    heads = next(iter(terms.values())).shape[-1]
    total = torch.eye(heads)[None, None, None]
    for name, matrices in terms.items():
        # A query has one matrix for all keys, a key one for all queries.
        total = total + (matrices[:, None] if name.startswith("key") else matrices[:, :, None])
    return total


def term_sizes(composition: Composition) -> dict[str, float]:
    """The size of each term relative to the identity: its Frobenius norm (root mean square over tokens) over `sqrt(H)`.

    The identity has size 1. A term of size `s` changes maps with uncorrelated heads by `s` times their norm.
    """
    squares: dict[str, Tensor] = {}
    for side in SIDES:
        down, up, gate = composition.side(side)
        if down is not None and up is not None:
            squares[f"{side}_low_rank"] = _low_rank_squares(down, up, composition.groups)
        if gate is not None:
            squares[f"{side}_gate"] = gate.float().square().sum(-1)
    if composition.static is not None:
        squares["static"] = composition.static.float().square().sum()
    heads = next((tensor.shape[-1] for tensor in composition.tensors().values()), 1)
    return {name: (value.mean() / heads).sqrt().item() for name, value in squares.items()}


def gate_share(sizes: dict[str, float]) -> float:
    """The share that gates have in the sum of squares of all `term_sizes`; 0 if there are no terms."""
    squares = {name: size**2 for name, size in sizes.items()}
    total = sum(squares.values())
    return sum(square for name, square in squares.items() if name.endswith("gate")) / total if total else 0.0


def _low_rank_squares(down: Tensor, up: Tensor, groups: int) -> Tensor:
    """The squared Frobenius norms `[B, T]` of `sum_r down_r up_r'` in all groups, from factors `[B, T, R, H]`."""
    down, up = (factor.float().unflatten(-1, (groups, -1)).transpose(2, 3) for factor in (down, up))
    return ((down @ down.mT) * (up @ up.mT)).sum((-1, -2, -3))


def effective_rank(matrices: Tensor) -> float:
    """The mean effective rank of matrices `[..., H, H]`: the exponential of the entropy of their singular values.

    It is `H` for the identity, and 1 for a matrix of rank one. Roy and Vetterli, "The effective rank: a measure of
    effective dimensionality", EUSIPCO 2007.
    """
    values = torch.linalg.svdvals(matrices.flatten(0, -3))
    shares = values / values.sum(-1, keepdim=True)
    return float(torch.special.entr(shares).sum(-1).exp().mean())


def head_similarity(maps: Tensor, visible: Tensor) -> float:
    """The mean cosine similarity of the maps `[H, T, S]` of different heads, over the pairs `visible` `[T, S]`."""
    rows = maps[:, visible].float()  # [H, visible pairs]
    rows = rows / rows.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    cosines = rows @ rows.T
    heads = len(rows)
    return ((cosines.sum() - cosines.trace()) / (heads * (heads - 1))).item()


def without_term(stage: Composition, term: str) -> Composition | None:
    """The composition without one of `TERMS`; None if nothing is left."""
    absent: dict[str, Any] = dict.fromkeys(TERMS[term])
    rest = replace(stage, **absent)
    return rest if rest.tensors() else None
