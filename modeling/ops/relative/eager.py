"""The reference implementation: relative attention in the order of its equation, with all intermediates in memory."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..distance_tables import at_distances
from ..masking import both, key_distances, masked_softmax, split_mask, visible_distances


class PositionTerms(NamedTuple):
    """What a call adds to the products of queries and keys, and how it counts distances; see `relative_attention`."""

    embeddings: Tensor | None = None  # [L, H, D]
    bias: Tensor | None = None  # [L, H]
    content_bias: Tensor | None = None  # [H, D]
    offset: int | Tensor | None = None  # position of the first query among the keys; None: the last is at the last key
    later_rows: int = 0  # how many rows of the tables, from the first on, belong to later keys
    has_finite_bias: bool = False  # whether the bias surely hides no key, as it does where it is minus infinity

    @property
    def tables(self) -> dict[str, Tensor]:
        """The tables by distance that there are, by the names that they have as arguments."""
        named = {"position_embeddings": self.embeddings, "position_bias": self.bias}
        return {name: table for name, table in named.items() if table is not None}

    def content_query(self, query: Tensor) -> Tensor:
        """What is multiplied by keys: queries `[B, H, T, D]` plus the content bias."""
        return query if self.content_bias is None else query + self.content_bias[:, None]

    def position_scores(self, query: Tensor, distance: Tensor) -> Tensor | None:
        """The terms of the score that read the tables, before scaling.

        Args:
            query: `[B, H, T, D]`.
            distance: `[T, S]`, how many places each key is before each query. Where the tables have no row for it, the
                nearest is read, and the caller must hide the key.

        Returns:
            Broadcastable to `[B, H, T, S]`; None without tables.
        """
        rows = distance + self.later_rows
        scores: Tensor | None = None
        if self.embeddings is not None:
            by_distance = torch.einsum("bhtd,lhd->bhtl", query, self.embeddings)
            index = rows.clamp(0, self.embeddings.shape[0] - 1).expand(*query.shape[:3], -1)
            scores = by_distance.gather(-1, index)
        if self.bias is not None:
            by_distance = at_distances(self.bias, rows)
            scores = by_distance if scores is None else scores + by_distance
        return scores


NO_TERMS = PositionTerms()


def relative_eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    attention_mask: Tensor | None,
    is_causal: bool,
    sliding_window: int | None,
    dropout: float = 0.0,
    terms: PositionTerms = NO_TERMS,
) -> tuple[Tensor, Tensor]:
    """`relative_attention` by definition, with the softmax in at least float32.

    Returns:
        The output `[B, T, H, D]` and the probabilities `[B, H, T, S]`.
    """
    distance = key_distances(query.shape[2], key.shape[2], terms.offset, query.device)
    scores = terms.content_query(query) @ key.transpose(-1, -2)  # [B, H, T, S]
    positions = terms.position_scores(query, distance)
    scores = (scores if positions is None else scores + positions) * scaling
    given, bias = split_mask(attention_mask)
    visible = both(visible_distances(distance, is_causal=is_causal, sliding_window=sliding_window), given)
    scores = scores if bias is None else scores + bias
    probs = masked_softmax(scores, visible, are_biased=terms.bias is not None)
    probs = F.dropout(probs, dropout) if dropout else probs
    return (probs.to(value.dtype) @ value).transpose(1, 2), probs
