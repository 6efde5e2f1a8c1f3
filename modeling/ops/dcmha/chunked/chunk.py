"""The arithmetic of `dcmha_chunked` on one chunk: `c` queries of `b` batch items and the `n` keys that they can reach.

Maps are `[c, bH, n]`, the heads of one item after those of the other, and contiguous along the keys. Results go to
buffers that the caller reuses from chunk to chunk: fresh memory costs more than the arithmetic in it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .composers.interface import Composer, Sight, Stage


class Gradients(NamedTuple):
    """Where the gradients of a chunk's factors and mask are added."""

    pre: Stage | None
    post: Stage | None
    mask: Tensor | None  # [b or 1, H or 1, c or 1, n or 1]


class Mixing(NamedTuple):
    """All that happens between a chunk's matrix products: from scores to what multiplies the values, and back."""

    pre: Stage | None
    post: Stage | None
    sight: Sight
    composer: Composer

    def forward(self, scores: Tensor, spare: Tensor, scratch: Tensor) -> Tensor:
        """Returns the composed probabilities, in `scores` or in `spare`."""
        composer, maps = self.composer, _Maps(scores, spare, self.composer.in_place)
        if self.pre is not None:
            maps.advance(composer.compose, self.pre, scratch)
        maps.advance(composer.softmax, self.sight)
        if self.post is not None:
            maps.advance(composer.compose, self.post, scratch)
        return maps.latest

    def repeat(self, scores: Tensor, composed: Tensor, probs: Tensor, mixed: Tensor, scratch: Tensor) -> None:
        """Does the same for the backward pass: keeps scores and probabilities that are composed."""
        if self.pre is not None:
            self.composer.compose(composed, scores, self.pre, scratch)
        self.composer.softmax(probs, composed, self.sight)
        if self.post is not None:
            self.composer.compose(mixed, probs, self.post, scratch)

    def backward(
        self, grad: Tensor, spare: Tensor, scores: Tensor, probs: Tensor, sums: Gradients, scratch: Tensor
    ) -> Tensor:
        """Returns the gradient of the scores, in `grad` or in `spare`; `grad` is that of what `forward` returns."""
        composer, maps = self.composer, _Maps(grad, spare, self.composer.in_place)
        if self.post is not None:
            maps.advance(composer.compose_backward, probs, self.post, sums.post, scratch)
        maps.advance(composer.softmax_backward, probs, self.sight)
        if sums.mask is not None:
            sums.mask.add_(self.sight.by_item(maps.latest).sum_to_size(sums.mask.shape))
        if self.pre is not None:
            maps.advance(composer.compose_backward, scores, self.pre, sums.pre, scratch)
        return maps.latest


class _Maps:
    """The latest of maps that are made of one another: in place, or in two buffers in turn."""

    def __init__(self, latest: Tensor, spare: Tensor, in_place: bool) -> None:
        self.latest, self.spare = latest, latest if in_place else spare

    def advance(self, function: Callable[..., None], *arguments: object) -> None:
        """Calls `function(out, latest, *arguments)`."""
        function(self.spare, self.latest, *arguments)
        self.latest, self.spare = self.spare, self.latest


class Products(NamedTuple):
    """Where the gradients that are matrix products go: the queries' are written, the others added."""

    query: Tensor  # [bH, c, D]
    key: Tensor  # [bH_kv, n, D]
    value: Tensor  # [bH_kv, n, D]


def attend_chunk(
    out: Tensor,
    query: Tensor,
    key_columns: Tensor,
    value: Tensor,
    scaling: float,
    mixing: Mixing,
    buffers: list[Tensor],
) -> None:
    """Writes a chunk's output to `out` `[bH, c, D]`; uses three buffers `[c, bH, n]`.

    Args:
        query: `[bH, c, D]`.
        key_columns: `[bH_kv, D, n]`.
        value: `[bH_kv, n, D]`.
    """
    scores, spare, scratch = buffers
    multiply_heads(query, key_columns, scaling, out=scores.transpose(0, 1))
    mixed = mixing.forward(scores, spare, scratch)
    multiply_heads(mixed.transpose(0, 1), value, out=out)


def attend_chunk_backward(
    products: Products,
    sums: Gradients,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    key_columns: Tensor,
    value_columns: Tensor,
    scaling: float,
    mixing: Mixing,
    buffers: list[Tensor],
) -> None:
    """Differentiates `attend_chunk`, which it repeats up to the output; uses five buffers.

    Args:
        grad_out: `[bH, c, D]`.
        query: `[bH, c, D]`.
        key: `[bH_kv, n, D]`.
        key_columns, value_columns: `[bH_kv, D, n]` both.
    """
    scores, composed, probs, mixed, scratch = buffers
    if mixing.pre is None:
        composed = scores
    if mixing.composer.in_place:
        probs = composed
    multiply_heads(query, key_columns, scaling, out=scores.transpose(0, 1))
    mixing.repeat(scores, composed, probs, mixed, scratch)
    add_to_heads(products.value, (probs if mixing.post is None else mixed).permute(1, 2, 0), grad_out)

    multiply_heads(grad_out, value_columns, out=mixed.transpose(0, 1))
    grad_scores = mixing.backward(mixed, composed, scores, probs, sums, scratch)
    grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)  # a product into one piece is faster
    multiply_heads(grad_scores.transpose(0, 1), key, scaling, out=grad_query)
    products.query.copy_(grad_query)
    add_to_heads(products.key, grad_scores.permute(1, 2, 0), query, scaling)


def multiply_heads(left: Tensor, right: Tensor, scaling: float = 1.0, *, out: Tensor) -> None:
    """`out[h] = left[h] @ right[h // repeats] * scaling`: `[H, a, b]` by `[H_kv, b, d]`, without repeating `right`."""
    repeats = left.shape[0] // right.shape[0]
    for rows, product in zip(_every(left, repeats), _every(out, repeats), strict=True):
        torch.baddbmm(product, rows, right, beta=0, alpha=scaling, out=product)


def add_to_heads(total: Tensor, left: Tensor, right: Tensor, scaling: float = 1.0) -> None:
    """`total[j] +=` the sum of `left[h] @ right[h] * scaling` over the heads `h` that share `j`."""
    repeats = left.shape[0] // total.shape[0]
    for one, other in zip(_every(left, repeats), _every(right, repeats), strict=True):
        total.baddbmm_(one, other, alpha=scaling)


def _every(heads: Tensor, step: int) -> list[Tensor]:
    """Every `step`th head, from each of the first ones on."""
    return [heads] if step == 1 else [heads[first::step] for first in range(step)]
