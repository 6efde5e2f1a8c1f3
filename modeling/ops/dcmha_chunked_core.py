"""The arithmetic of `dcmha_chunked` on one chunk: `c` queries of one batch item and the `n` keys that they can reach.

Maps are `[c, H, n]`: what a query mixes is one small matrix product, and everything is contiguous along the keys.
Results go to buffers that the caller reuses from chunk to chunk: fresh memory costs more than the arithmetic in it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Stage(NamedTuple):
    """One stage's factors, or their gradients, in packed rows: `R` down, `R` up and, if they are odd, a gate."""

    query: Tensor | None  # [c, rows, H]
    key: Tensor | None  # [rows, H, n]
    static: Tensor | None  # [H, H], indexed [in, out]
    groups: int


class Composer(NamedTuple):
    """The face of both ways to compose a chunk: step by step, here, or fused by a compiler."""

    # (out, maps, stage, scratch): writes the composition of `maps` to `out`.
    forward: Callable[[Tensor, Tensor, Stage, Tensor], None]
    # (out, gradient, maps, stage, scratch): writes the gradient of `maps` to `out`, given that of their composition;
    # returns those of the factors.
    backward: Callable[[Tensor, Tensor, Tensor, Stage, Tensor], Stage]


# Sets hidden scores to minus infinity; returns where rows `[c, H, 1]` have nothing left, or None where none can be.
Hide = Callable[[Tensor], Tensor | None]


def attend_chunk(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: Stage | None,
    post: Stage | None,
    hide: Hide,
    composer: Composer,
    buffers: list[Tensor],
) -> None:
    """Writes a chunk's output to `out` `[c, H, D]`; uses three buffers `[c, H, n]`.

    Args:
        query: `[H, c, D]`, scaled.
        key: `[H_kv, D, n]`.
        value: `[H_kv, n, D]`.
    """
    probs = _probabilities(query, key, pre, hide, composer, buffers)
    if post is not None:
        composer.forward(buffers[0], probs, post, buffers[1])
        probs = buffers[0]
    multiply_heads(probs.transpose(0, 1), value, out=out.transpose(0, 1))


class ChunkGradients(NamedTuple):
    """Where `attend_chunk_backward` puts the gradients of its tensors; those of the keys and values are added to."""

    query: Tensor  # [H, c, D]
    key: Tensor  # [H_kv, n, D]
    value: Tensor  # [H_kv, n, D]


def attend_chunk_backward(
    grads: ChunkGradients,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: Stage | None,
    post: Stage | None,
    hide: Hide,
    composer: Composer,
    buffers: list[Tensor],
) -> tuple[Stage | None, Stage | None, Tensor]:
    """Differentiates `attend_chunk`, which it repeats up to the output; uses five buffers.

    Args:
        grad_out: `[H, c, D]`.
        query: `[H, c, D]`, scaled.
        key, value: `[H_kv, D, n]` both.

    Returns:
        The gradients of both stages and of the composed scores, the last one in a buffer.
    """
    scores, grad_composed, _, spare, scratch = buffers
    probs = _probabilities(query, key, pre, hide, composer, buffers)
    multiply_heads(grad_out, value, out=grad_composed.transpose(0, 1))
    for_pre = for_post = None
    if post is None:
        composed, grad_probs = probs, grad_composed
    else:
        composed = grad_probs = spare
        composer.forward(composed, probs, post, scratch)
    add_to_heads(grads.value, composed.permute(1, 2, 0), grad_out)
    if post is not None:
        for_post = composer.backward(grad_probs, grad_composed, probs, post, scratch)
    grad_scores = spare if post is None else grad_composed
    torch.ops.aten._softmax_backward_data.out(grad_probs, probs, -1, probs.dtype, grad_input=grad_scores)
    grad_hidden = grad_scores
    if pre is not None:
        grad_scores = spare if grad_hidden is grad_composed else grad_composed
        for_pre = composer.backward(grad_scores, grad_hidden, scores, pre, scratch)
    multiply_heads(grad_scores.transpose(0, 1), key.transpose(1, 2), out=grads.query)
    add_to_heads(grads.key, grad_scores.permute(1, 2, 0), query)
    return for_pre, for_post, grad_hidden


def _probabilities(
    query: Tensor, key: Tensor, pre: Stage | None, hide: Hide, composer: Composer, buffers: list[Tensor]
) -> Tensor:
    """Leaves the scores in the first buffer; returns the probabilities, which are in the third."""
    scores, composed, probs = buffers[:3]
    multiply_heads(query, key, out=scores.transpose(0, 1))
    if pre is None:
        composed = scores
    else:
        composer.forward(composed, scores, pre, probs)
    empty = hide(composed)
    torch.softmax(composed, dim=-1, out=probs)
    if empty is not None:
        probs.masked_fill_(empty, 0.0)
    return probs


def multiply_heads(left: Tensor, right: Tensor, *, out: Tensor) -> None:
    """`out[h] = left[h] @ right[h // repeats]`: `[H, a, b]` by `[H_kv, b, d]`, without repeating `right`."""
    repeats = left.shape[0] // right.shape[0]
    for first in range(repeats):
        torch.bmm(left[first::repeats], right, out=out[first::repeats])


def add_to_heads(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total[j] +=` the sum of `left[h] @ right[h]` over the heads `h` that share `j`."""
    repeats = left.shape[0] // total.shape[0]
    for first in range(repeats):
        total.baddbmm_(left[first::repeats], right[first::repeats])


def split_rows(rows: Tensor, dim: int = 0) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor | None]:
    """Returns the down rows, the up rows and the gate of packed rows."""
    single = rows.unbind(dim)
    rank = len(single) // 2
    return single[:rank], single[rank : 2 * rank], single[-1] if len(single) % 2 else None
