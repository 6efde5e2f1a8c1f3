"""The reference implementation: DCMHA in the order of the paper's equations, with every intermediate in memory."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..distance_tables import NO_TABLES, DistanceTables, at_distances
from ..masking import both, key_distances, masked_softmax, split_mask, visible_distances, with_first_keys
from .composition import Composition


class AttentionMaps(NamedTuple):
    """The maps of a call of `dcmha_attention`, each `[B, H, T, S]`; None for one that was not asked for.

    Scores are there for hidden keys too, whose probabilities are 0. Composed probabilities can be negative, and those
    of a query need not sum to one. A stage without composition and without a table by distance changes nothing: its
    composed maps are the maps before it.
    """

    scores: Tensor | None = None  # Q K^T * scaling
    composed_scores: Tensor | None = None  # mixed by `pre`, before masks and a bias that is not composed
    probs: Tensor | None = None  # after masks and softmax, before the gain
    composed_probs: Tensor | None = None  # mixed by `post`; these weigh the values


def keep(name: str, maps: Tensor) -> Tensor:
    """The hook that changes nothing: returns the maps `[B, H, T, S]`."""
    return maps


def dcmha_eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pre: Composition | None,
    post: Composition | None,
    scaling: float,
    attention_mask: Tensor | None,
    is_causal: bool,
    sliding_window: int | None,
    first_keys: Tensor | None = None,
    tables: DistanceTables = NO_TABLES,
    hook: Callable[[str, Tensor], Tensor] = keep,
) -> tuple[Tensor, Tensor]:
    """`dcmha_attention` by definition, with the same arguments. Softmax runs in at least float32.

    Args:
        query: `[B, H, T, D]`.
        key, value: `[B, H_kv, S, D]`.
        tables: the bias and the gain by distance, and the position of the first query among the keys.
        hook: called with the name and the maps `[B, H, T, S]` of each field of `AttentionMaps`; the attention goes on
            with the maps that it returns.

    Returns:
        The output `[B, T, H, D]` and the composed probabilities `[B, H, T, S]`, which can be negative and whose rows
        need not sum to one.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    distance = key_distances(query.shape[2], key.shape[2], tables.offset, query.device)  # [T, S]
    bias_by_distance = None if tables.bias is None else at_distances(tables.bias, distance)  # [H, T, S]
    scores = hook("scores", query @ key.transpose(-1, -2) * scaling)  # [B, H, T, S]
    if bias_by_distance is not None and tables.compose_bias:
        scores = scores + bias_by_distance
    if pre is not None:
        scores = compose(scores, pre)
    scores = hook("composed_scores", scores)
    if bias_by_distance is not None and not tables.compose_bias:
        scores = scores + bias_by_distance
    structural = visible_distances(distance, is_causal=is_causal, sliding_window=sliding_window)
    given, bias = split_mask(with_first_keys(attention_mask, first_keys, scores.shape[-1], scores.device))
    scores = scores if bias is None else scores + bias
    probs = masked_softmax(scores, both(structural, given), are_biased=tables.bias is not None)
    probs = hook("probs", probs)
    if tables.gain is not None:
        probs = probs * at_distances(tables.gain, distance)
    if post is not None:
        probs = compose(probs, post)
    probs = probs.to(value.dtype)  # factors or tables in float32 make the maps float32
    probs = hook("composed_probs", probs)
    return (probs @ value).transpose(1, 2), probs


def attend_to_all(
    query: Tensor, key: Tensor, value: Tensor, pre: Composition | None, post: Composition | None
) -> Tensor:
    """`dcmha_eager` without masks and tables by distance: the output `[B, T, H, D]`."""
    nothing_hidden: Any = {"attention_mask": None, "is_causal": False, "sliding_window": None}
    return dcmha_eager(query, key, value, pre=pre, post=post, scaling=1.0, **nothing_hidden)[0]


def compose(scores: Tensor, composition: Composition) -> Tensor:
    """Mixes the heads of each (query, key) pair, independently of all other pairs, as `Composition` defines.

    Args:
        scores: `[B, H, T, S]`.

    Returns:
        `[B, H, T, S]`, in float32 if factors are and the scores are in half precision.
    """
    dtype = functools.reduce(torch.promote_types, (term.dtype for term in composition.tensors().values()), scores.dtype)
    scores, composition = scores.to(dtype), composition.map(lambda term: term.to(dtype))
    composed = scores
    if composition.static is not None:
        composed = composed + torch.einsum("bnts,nm->bmts", scores, composition.static)
    if composition.query_down is not None and composition.query_up is not None:
        composed = composed + _low_rank(scores, composition.query_down, composition.query_up, composition.groups, "t")
    if composition.key_down is not None and composition.key_up is not None:
        composed = composed + _low_rank(scores, composition.key_down, composition.key_up, composition.groups, "s")
    if composition.query_gate is not None:
        composed = composed + scores * composition.query_gate.transpose(1, 2)[:, :, :, None]
    if composition.key_gate is not None:
        composed = composed + scores * composition.key_gate.transpose(1, 2)[:, :, None, :]
    return composed


def _low_rank(scores: Tensor, down: Tensor, up: Tensor, groups: int, axis: str) -> Tensor:
    """The low-rank term that is added to `scores`: in each group, from heads to `R` hidden maps and back to heads.

    Args:
        scores: `[B, H, T, S]`; so is the result.
        down, up: `[B, T, R, H]` of the query (`axis` "t") or `[B, S, R, H]` of the key (`axis` "s").
    """
    grouped = scores.unflatten(1, (groups, -1))  # [B, G, H/G, T, S]
    down, up = (factor.unflatten(-1, (groups, -1)) for factor in (down, up))  # [B, T or S, R, G, H/G]
    hidden = torch.einsum(f"bghts,b{axis}rgh->bgrts", grouped, down)
    return torch.einsum(f"bgrts,b{axis}rgh->bghts", hidden, up).flatten(1, 2)
