"""The arithmetic of a chunk in PyTorch operators: `c` queries of an item and the `n` keys that they can see.

Maps, which are scores, probabilities or gradients of either, are `[c, H, n]`, contiguous along the keys. Results go to
buffers that the caller reuses from chunk to chunk, because allocating fresh memory would cost more than the arithmetic.
On a CPU, C code does the same where it can (see `passes.py`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...scaled_products import scaled_bmm
from .composers.interface import ChunkComposer, ChunkVisibility, StageFactors
from .distance_blocks import ChunkTables


class ChunkGradients(NamedTuple):
    """The chunk's part of the gradients of all inputs: views.

    The chunk writes the gradient of its queries, and adds to all others, which other chunks share.
    """

    query: Tensor  # [H, c, D]
    key: Tensor  # [H_kv, n, D]
    value: Tensor  # [H_kv, n, D]
    pre: StageFactors
    post: StageFactors
    mask: Tensor | None  # [H or 1, c or 1, n or 1]
    tables: ChunkTables


class ScoreTransform(NamedTuple):
    """What happens to a chunk's scores before they multiply the values: compose, mask, softmax, compose."""

    pre: StageFactors | None
    post: StageFactors | None
    tables: ChunkTables
    compose_bias: bool  # whether the bias of the tables is added before the first composition
    visibility: ChunkVisibility
    composer: ChunkComposer

    def forward(
        self, scores: Tensor, composed: Tensor, probs: Tensor, gained: Tensor, mixed: Tensor, scratch: Tensor
    ) -> Tensor:
        """Writes the result of each step to a buffer, and returns the last, which weighs the values; all `[c, H, n]`.

        Args:
            scores: the products of queries and keys; the bias is added in place if it comes before the first
                composition.
            composed: gets the composed scores. Without the stage `pre` it has to be `scores` itself.
            probs: gets the probabilities.
            gained: gets the probabilities times the gain; may be `probs` itself, and without a gain has to be.
            mixed: gets the composed probabilities; not written without the stage `post`. May be `composed` itself.
        """
        self._add_bias(scores, is_composed=False)
        if self.pre is not None:
            self.composer.compose(composed, scores, self.pre, scratch)
        self._add_bias(composed, is_composed=True)
        # A bias of minus infinity can leave a query without keys, as a mask can.
        softmax(probs, composed, self.visibility, self.tables.bias is not None or self.visibility.has_empty_rows())
        if self.tables.gain is not None:
            torch.mul(probs, self.tables.gain.transpose(0, 1), out=gained)
        if self.post is not None:
            self.composer.compose(mixed, gained, self.post, scratch)
        return gained if self.post is None else mixed

    def _add_bias(self, scores: Tensor, *, is_composed: bool) -> None:
        """Adds the bias by distance to scores `[c, H, n]`, if it belongs to scores that are composed or not yet so."""
        if self.tables.bias is not None and self.compose_bias != is_composed:
            scores.add_(self.tables.bias.transpose(0, 1))

    def backward(
        self,
        grad: Tensor,
        spare: Tensor,
        scores: Tensor,
        probs: Tensor,
        gained: Tensor,
        sums: ChunkGradients,
        scratch: Tensor,
    ) -> Tensor:
        """Returns the gradient of the scores, in `grad` or in `spare`, and adds those of all factors to `sums`.

        Each step reads the latest gradient in one of the two buffers and writes its own into the other.

        Args:
            grad: the gradient of what `forward` returns, `[c, H, n]` like all other maps.
            spare: a buffer that is overwritten.
            scores, probs, gained: what `forward` left in them.
        """
        if self.post is not None:
            self.composer.compose_backward(spare, grad, gained, self.post, sums.post, scratch)
            grad, spare = spare, grad
        if self.tables.gain is not None and sums.tables.gain is not None:
            sums.tables.gain.addcmul_(probs.transpose(0, 1), grad.transpose(0, 1))
            grad.mul_(self.tables.gain.transpose(0, 1))
        softmax_backward(spare, grad, probs)
        grad, spare = spare, grad
        if sums.mask is not None:
            sums.mask.add_(grad.transpose(0, 1).sum_to_size(sums.mask.shape))
        if sums.tables.bias is not None and not self.compose_bias:
            sums.tables.bias.add_(grad.transpose(0, 1))
        if self.pre is not None:
            self.composer.compose_backward(spare, grad, scores, self.pre, sums.pre, scratch)
            grad = spare
        if sums.tables.bias is not None and self.compose_bias:
            sums.tables.bias.add_(grad.transpose(0, 1))
        return grad


def softmax(out: Tensor, scores: Tensor, visibility: ChunkVisibility, has_empty_rows: bool) -> None:
    """Writes the probabilities of `scores` to `out`, both `[c, H, n]`; overwrites hidden scores.

    Queries that see no key get zeros, for which the function looks if `has_empty_rows` tells that there can be any.
    """
    visibility.hide(scores)
    torch.softmax(scores, dim=-1, out=out)
    if has_empty_rows:
        out.masked_fill_(scores.amax(-1, keepdim=True) == -torch.inf, 0.0)


def softmax_backward(out: Tensor, gradient: Tensor, probs: Tensor) -> None:
    """Writes the gradient of the scores of `softmax` to `out`, from that of its `probs`; all are `[c, H, n]`."""
    torch.ops.aten._softmax_backward_data.out(gradient, probs, -1, probs.dtype, grad_input=out)


def attend_chunk(
    query: Tensor,
    key_transposed: Tensor,
    value: Tensor,
    scaling: float,
    transform: ScoreTransform,
    buffers: list[Tensor],
) -> Tensor:
    """Returns a chunk's output `[H, c, D]`; uses three buffers `[c, H, n]`.

    Args:
        query: `[H, c, D]`.
        key_transposed: `[H_kv, D, n]`.
        value: `[H_kv, n, D]`.
    """
    scores, spare, scratch = buffers
    multiply_heads(query, key_transposed, scaling, out=scores.transpose(0, 1))
    composed, probs = (scores, spare) if transform.pre is None else (spare, scores)
    weights = transform.forward(scores, composed, probs, probs, composed, scratch)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    multiply_heads(weights.transpose(0, 1), value, out=out)
    return out


def attend_chunk_backward(
    sums: ChunkGradients,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    key_transposed: Tensor,
    value_transposed: Tensor,
    scaling: float,
    transform: ScoreTransform,
    buffers: list[Tensor],
) -> None:
    """Differentiates `attend_chunk`, whose maps it computes again; uses six buffers `[c, H, n]`.

    Args:
        grad_out: `[H, c, D]`.
        query: `[H, c, D]`.
        key: `[H_kv, n, D]`.
        key_transposed, value_transposed: `[H_kv, D, n]` both.
    """
    scores, composed, probs, gained, mixed, scratch = buffers
    if transform.pre is None:
        composed = scores
    if transform.tables.gain is None:
        gained = probs
    multiply_heads(query, key_transposed, scaling, out=scores.transpose(0, 1))
    weights = transform.forward(scores, composed, probs, gained, mixed, scratch)
    add_to_heads(sums.value, weights.permute(1, 2, 0), grad_out)

    # What is in `mixed` and `composed` is no longer needed: from here on they take turns to hold gradients of the maps.
    multiply_heads(grad_out, value_transposed, out=mixed.transpose(0, 1))
    grad_scores = transform.backward(mixed, composed, scores, probs, gained, sums, scratch)
    # A product into contiguous memory and a copy are faster than a product into `sums.query`, a strided view.
    grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    multiply_heads(grad_scores.transpose(0, 1), key, scaling, out=grad_query)
    sums.query.copy_(grad_query)
    add_to_heads(sums.key, grad_scores.permute(1, 2, 0), query, scaling)


def multiply_heads(left: Tensor, right: Tensor, scaling: float = 1.0, *, out: Tensor) -> None:
    """`out[h] = left[h] @ right[h // repeats] * scaling`: `[H, a, b]` by `[H_kv, b, d]`, without repeating `right`."""
    repeats = left.shape[0] // right.shape[0]
    for rows, product in zip(_every(left, repeats), _every(out, repeats), strict=True):
        scaled_bmm(rows, right, scaling, out=product)


def add_to_heads(total: Tensor, left: Tensor, right: Tensor, scaling: float = 1.0) -> None:
    """Adds `left[h] @ right[h] * scaling` to `total[h // repeats]`: `[H, a, b]` by `[H, b, d]` to `[H_kv, a, d]`."""
    repeats = left.shape[0] // total.shape[0]
    for one, other in zip(_every(left, repeats), _every(right, repeats), strict=True):
        total.baddbmm_(one, other, alpha=scaling)


def _every(heads: Tensor, step: int) -> list[Tensor]:
    """`[H, a, b]` as `step` views `[H / step, a, b]`; view `i` has the heads `i`, `i + step`, `i + 2 step`, ..."""
    return [heads[first::step] for first in range(step)]
