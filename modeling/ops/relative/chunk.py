"""One chunk of the queries of relative attention: its scores, its gradients and the rows of the tables it reaches.

A chunk has `c` queries and the `n` keys that any of them sees. Its scores against the position tables come from one
matrix product `[c, x]` of the queries with the rows of the table that they reach, from the farthest distance to the
nearest; `relative_shift.py` turns them into scores by key. There are `x = n + c - 1` distances between the queries and
the keys of a chunk; under causality the first `n` of them are enough, since no query sees the others.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..dtypes import at_least_float32
from ..masking import Structure, part_of_mask
from .relative_shift import shifted, unshifted

# How many queries a chunk has.
CHUNK = 64


class Operands(NamedTuple):
    """The tensors that all chunks read, or their gradients; heads are first, as the batch of every matrix product."""

    query: Tensor  # [H, B, T, D]
    key: Tensor  # [H, B, S, D]
    value: Tensor  # [H, B, S, D]
    embeddings: Tensor | None  # [H, L, D], the farthest distance first
    bias: Tensor | None  # [H, L], the farthest distance first, in the dtype of the query or in float32
    content_bias: Tensor | None  # [H, 1, 1, D]
    visible: Tensor | None  # broadcastable to [H, B, T, S]
    added: Tensor | None  # additive mask, broadcastable to [H, B, T, S]

    @property
    def table(self) -> Tensor | None:
        """One of the tables `[H, L, ...]`, which have the same rows; None without any."""
        return self.bias if self.embeddings is None else self.embeddings

    def content_query(self, query: Tensor) -> Tensor:
        """What is multiplied by keys: queries `[H, B, c, D]` plus the content bias."""
        return query if self.content_bias is None else query + self.content_bias


class RelativeChunk(NamedTuple):
    """`c` consecutive queries and the `n` keys that any of them sees."""

    queries: slice
    keys: slice
    structure: Structure
    later_rows: int  # rows of the tables that belong to later keys
    bias_hides: bool  # whether the bias may hide keys, and with them all that a query sees

    @property
    def shape(self) -> tuple[int, int]:
        """`(c, n)`, the numbers of queries and keys."""
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start

    @property
    def distances(self) -> range:
        """The distances of the `x` columns of products with tables, from the farthest to the nearest."""
        num_queries, num_keys = self.shape
        farthest = self.queries.stop - 1 + self.structure.first_query - self.keys.start
        columns = num_keys if self.structure.is_causal else num_keys + num_queries - 1
        return range(farthest, farthest - columns, -1)

    def probabilities(self, operands: Operands, scaling: float) -> Tensor:
        """Softmax of the scores, `[H, B, c, n]`, in at least float32."""
        query = operands.query[:, :, self.queries]
        content = operands.content_query(query)
        key = operands.key[:, :, self.keys].transpose(-1, -2)
        positions = self._position_scores(operands, query)
        if positions is None or scaling == 0:  # with alpha = beta = 0 some kernels of `baddbmm` write no result
            scores = (content @ key).mul_(scaling)
        elif positions.dtype != content.dtype:
            scores = positions.unflatten(0, query.shape[:2]) + content @ key
            scores.mul_(scaling)
        else:
            batched = torch.baddbmm(
                positions.reshape(-1, *self.shape),
                content.flatten(0, 1),
                key.flatten(0, 1),
                beta=scaling,
                alpha=scaling,
            )
            scores = batched.unflatten(0, query.shape[:2])
        return self._softmax(scores, operands)

    def accumulate(self, operands: Operands, grads: Operands, grad_scores: Tensor) -> None:
        """Adds the chunk's part of the gradients of all operands except the values, from that of its scores.

        Args:
            grad_scores: `[H, B, c, n]`, of the scores before scaling.
        """
        query = operands.query[:, :, self.queries]
        grad_query = grad_scores @ operands.key[:, :, self.keys]
        grads.key[:, :, self.keys] += grad_scores.transpose(-1, -2) @ operands.content_query(query)
        if grads.content_bias is not None:
            grads.content_bias.add_(grad_query.sum((1, 2), keepdim=True, dtype=grads.content_bias.dtype))
        if operands.table is not None:
            by_distance = unshifted(grad_scores, len(self.distances), is_causal=self.structure.is_causal)
            by_distance = by_distance.flatten(1, 2)[..., self._real_columns(operands.table)]  # [H, B * c, L]
            if grads.bias is not None:
                self._table_rows(grads.bias).add_(by_distance.sum(1, dtype=grads.bias.dtype))
            if operands.embeddings is not None and grads.embeddings is not None:
                self._table_rows(grads.embeddings).add_(by_distance.transpose(-1, -2) @ query.flatten(1, 2))
                grad_query += (by_distance @ self._table_rows(operands.embeddings)).view_as(grad_query)
        grads.query[:, :, self.queries] = grad_query

    def dropout_mask(self, probs: Tensor, dropout: float, seed: Tensor | None) -> Tensor | None:
        """The factors `[H, B, c, n]` by which dropout multiplies probabilities; None without dropout.

        They depend on `seed` `[]` and the chunk alone, so that both passes get the same ones.
        """
        if seed is None:
            return None
        generator = torch.Generator(probs.device).manual_seed(int(seed) + self.queries.start)
        kept = torch.rand(probs.shape, dtype=torch.float32, device=probs.device, generator=generator) >= dropout
        return kept.to(probs.dtype).div_((1 - dropout) or 1.0)

    def _position_scores(self, operands: Operands, query: Tensor) -> Tensor | None:
        """Scores of `query` `[H, B, c, D]` against tables, shifted to `[H * B, c, n]`; undefined for hidden keys.

        They have the dtype of the query, or of a bias in a wider one.
        """
        table = operands.table
        if table is None:
            return None
        heads, batch = query.shape[:2]
        (num_queries, num_keys), columns = self.shape, len(self.distances)
        real = self._real_columns(table)
        dtype = query.dtype if operands.bias is None else torch.promote_types(query.dtype, operands.bias.dtype)
        by_distance = query.new_empty(heads, batch * num_queries, columns, dtype=dtype)
        reachable = by_distance[..., real]
        if operands.embeddings is None:
            reachable.copy_(self._table_rows(table)[:, None])
        else:
            rows = self._table_rows(operands.embeddings).transpose(-1, -2)
            if operands.bias is None:
                torch.bmm(query.flatten(1, 2), rows, out=reachable)
            elif operands.bias.dtype == query.dtype:
                torch.baddbmm(self._table_rows(operands.bias)[:, None], query.flatten(1, 2), rows, out=reachable)
            else:
                torch.add(self._table_rows(operands.bias)[:, None], query.flatten(1, 2) @ rows, out=reachable)
        return shifted(by_distance, num_queries, num_keys)

    def _table_rows(self, table: Tensor) -> Tensor:
        """The rows of a farthest-first table `[H, L, ...]` that queries of this chunk reach."""
        farthest = table.shape[1] - 1 - self.later_rows
        first, last = farthest - self.distances[0], farthest - self.distances[-1]
        return table[:, max(first, 0) : max(last + 1, 0)]

    def _real_columns(self, table: Tensor) -> slice:
        """The columns whose distance has a row in a table `[H, L, ...]`; the window hides the others."""
        length, farthest = self._table_rows(table).shape[1], table.shape[1] - 1 - self.later_rows
        first = min(max(self.distances[0] - farthest, 0), len(self.distances) - length)
        return slice(first, first + length)

    def _softmax(self, scores: Tensor, operands: Operands) -> Tensor:
        """Softmax of `scores` `[H, B, c, n]` over the visible keys, 0 for queries without any; overwrites `scores`."""
        self.structure.hide(scores, self.queries, self.keys)
        if operands.added is not None:
            scores = scores + part_of_mask(operands.added, self.queries, self.keys)
        if operands.visible is not None:
            hidden = ~part_of_mask(operands.visible, self.queries, self.keys)
            scores = scores.masked_fill_(hidden, -torch.inf)
        probs = torch.softmax(scores, dim=-1, dtype=at_least_float32(scores.dtype))
        # By its position a query of a causal chunk sees a key, and one without a window sees all of them.
        sees_any = self.structure.is_causal or self.structure.sliding_window is None
        if sees_any and operands.visible is None and not self.bias_hides:
            return probs
        return probs.masked_fill_(scores.eq(-torch.inf).all(-1, keepdim=True), 0.0)


def relative_chunks(structure: Structure, later_rows: int, bias_hides: bool) -> list[RelativeChunk]:
    """Divides the queries, which end where the keys end, into chunks of `CHUNK`; those that see no key are left out."""
    spans = structure.query_spans(CHUNK)
    chunks = [RelativeChunk(span, structure.reach(span), structure, later_rows, bias_hides) for span in spans]
    return [chunk for chunk in chunks if chunk.keys.stop > chunk.keys.start]
