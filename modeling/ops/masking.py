"""Which keys a query sees: causality, sliding window, given masks and packed documents."""

from typing import NamedTuple

import torch
from torch import Tensor

from .dtypes import at_least_float32


class Structure(NamedTuple):
    """Causality and the sliding window: which of `keys` keys each of `queries` queries sees by its position.

    Query `t` is at position `t + offset` among the keys. By default the last query is at the last key: `offset` is
    `S - T`. If `is_causal`, a query sees no later key. With a window it sees only keys that are fewer than
    `sliding_window` places away: itself, `sliding_window - 1` keys before it and, without causality, as many after it.
    """

    queries: int
    keys: int
    is_causal: bool
    sliding_window: int | None
    offset: int | None = None

    @classmethod
    def of_call(
        cls, query: Tensor, key: Tensor, offset: Tensor | None, is_causal: bool, sliding_window: int | None
    ) -> "Structure":
        """The structure of an attention call with `query` `[B, H, T, D]` and `key` `[B, H_kv, S, D]`.

        Args:
            offset: `[]`, an integer, or None. Reading it waits for the device, if it is on one.
        """
        place = None if offset is None else int(offset)
        return cls(query.shape[2], key.shape[2], is_causal, sliding_window, place)

    @property
    def first_query(self) -> int:
        """The position of the first query among the keys."""
        return self.keys - self.queries if self.offset is None else self.offset

    def query_spans(self, length: int) -> list[slice]:
        """Returns the queries in spans of this length; the last one may be shorter."""
        return [slice(start, min(start + length, self.queries)) for start in range(0, self.queries, length)]

    def reach(self, queries: slice) -> slice:
        """Returns the keys that any of these queries sees; an empty slice if they see none."""
        offset, first, last = self.first_query, 0, self.keys
        if self.sliding_window is not None:
            first = max(0, queries.start + offset - self.sliding_window + 1)
            last = min(last, queries.stop + offset + self.sliding_window - 1)
        if self.is_causal:
            last = min(last, queries.stop + offset)
        first = min(first, self.keys)
        return slice(first, max(first, last))

    def visible(self, queries: slice, keys: slice, device: torch.device) -> Tensor:
        """Returns `[c, n]` for `c` queries and `n` keys, True where a query sees a key."""
        position = torch.arange(queries.start, queries.stop, device=device) + self.first_query
        distance = position[:, None] - torch.arange(keys.start, keys.stop, device=device)
        visible = visible_distances(distance, is_causal=self.is_causal, sliding_window=self.sliding_window)
        return torch.ones_like(distance, dtype=torch.bool) if visible is None else visible

    def hide(self, scores: Tensor, queries: slice, keys: slice) -> None:
        """Sets `scores` `[..., c, n]` of keys that a query does not see to minus infinity; see `reach`."""
        for edge in self._edges(queries, keys):
            part = slice(edge.start - keys.start, edge.stop - keys.start)
            scores[..., part].masked_fill_(~self.visible(queries, edge, scores.device), -torch.inf)

    def _edges(self, queries: slice, keys: slice) -> list[slice]:
        """Returns the parts of `keys`, the reach of `queries`, that not all of these queries see."""
        offset, edges = self.first_query, []
        if self.sliding_window is not None:
            edges.append(slice(keys.start, min(keys.stop, queries.stop + offset - self.sliding_window)))
        ahead = 1 if self.is_causal else self.sliding_window
        if ahead is not None:
            edges.append(slice(max(keys.start, queries.start + offset + ahead), keys.stop))
        return [edge for edge in edges if edge.start < edge.stop]


def key_distances(queries: int, keys: int, offset: int | Tensor | None, device: torch.device) -> Tensor:
    """How many places each key is before each query, `[T, S]`; negative for later keys.

    Args:
        offset: position of the first query among the keys, an integer or `[]`; None puts the last query at the last
            key.
    """
    first = keys - queries if offset is None else offset
    return (torch.arange(queries, device=device) + first)[:, None] - torch.arange(keys, device=device)


def visible_distances(distance: Tensor, *, is_causal: bool, sliding_window: int | None) -> Tensor | None:
    """True where a query sees the key at this `distance` `[T, S]`, same shape; None if every query sees every key."""
    if not is_causal and sliding_window is None:
        return None
    visible = torch.ones_like(distance, dtype=torch.bool)
    if is_causal:
        visible &= distance >= 0
    if sliding_window is not None:
        visible &= distance.abs() < sliding_window
    return visible


def visible_keys(
    queries: int,
    keys: int,
    *,
    is_causal: bool,
    sliding_window: int | None,
    device: torch.device,
    offset: int | Tensor | None = None,
) -> Tensor | None:
    """Which keys each query sees by position, `[T, S]`; None where every query sees every key."""
    if not is_causal and sliding_window is None:
        return None
    distance = key_distances(queries, keys, offset, device)
    return visible_distances(distance, is_causal=is_causal, sliding_window=sliding_window)


def split_mask(attention_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Returns (visible, bias) of a mask `[..., T, S]`: a boolean mask and, for an additive one, what it adds.

    Additive masks mark hidden keys by the lowest finite value of their dtype or by minus infinity.
    """
    if attention_mask is None or attention_mask.dtype == torch.bool:
        return attention_mask, None
    visible = attention_mask > torch.finfo(attention_mask.dtype).min
    return visible, attention_mask


def join_mask(visible: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """The inverse of `split_mask`: one mask `[..., T, S]`, in which hidden keys get the lowest finite value.

    It is boolean if there is no bias, additive in the dtype of the bias otherwise, and None if both are None.
    """
    if visible is None or bias is None:
        return visible if bias is None else bias
    return torch.where(visible, bias, torch.finfo(bias.dtype).min)


def with_first_keys(
    attention_mask: Tensor | None, first_keys: Tensor | None, keys: int, device: torch.device
) -> Tensor | None:
    """Returns `attention_mask` with the keys before each query's first key hidden too, broadcastable to `[B, H, T, S]`.

    Args:
        attention_mask: broadcastable to `[B, H, T, S]`, boolean or additive.
        first_keys: `[B, T]` integers, or None to hide nothing.
    """
    if first_keys is None:
        return attention_mask
    positions = torch.arange(keys, device=device)
    visible, bias = split_mask(attention_mask)
    allowed = (positions >= first_keys.to(device)[..., None])[:, None]  # [B, 1, T, S]
    return both(allowed, visible) if bias is None else join_mask(allowed, bias)


def mask_one_query(
    mask: Tensor | None,
    keys: int,
    is_causal: bool,
    sliding_window: int | None,
    offset: int | Tensor,
    device: torch.device,
) -> Tensor | None:
    """The mask of a single query at position `offset`, with causality and window in it.

    Args:
        mask: four dimensions that broadcast to `[B, H, 1, S]`, as what is returned, which is boolean or additive like
            this one.
    """
    structural = visible_keys(1, keys, is_causal=is_causal, sliding_window=sliding_window, device=device, offset=offset)
    given, bias = split_mask(mask)
    visible = both(None if structural is None else structural[None, None], given)
    return join_mask(visible, bias)


def four_dimensional(mask: Tensor) -> Tensor:
    """A mask of up to four dimensions with leading ones added: `[T, S]` becomes `[1, 1, T, S]`."""
    return mask[(None,) * (4 - mask.ndim)]


def part_of_mask(mask: Tensor, queries: slice, keys: slice) -> Tensor:
    """The part of a mask `[..., T or 1, S or 1]`, or of its gradient, that is of these queries and keys."""
    return mask[..., queries if mask.shape[-2] > 1 else slice(None), keys if mask.shape[-1] > 1 else slice(None)]


def both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """The keys that both boolean masks `[..., T, S]` leave visible; None stands for a mask that hides nothing."""
    if first is None or second is None:
        return second if first is None else first
    return first & second


def masked_softmax(scores: Tensor, visible: Tensor | None, *, are_biased: bool = False, dim: int = -1) -> Tensor:
    """Softmax of `scores` over the keys, computed in at least float32 and returned in their dtype.

    Hidden keys get zero, and so do all keys of a query that sees none.

    Args:
        scores: of any shape, `[..., T, S]` by default.
        visible: broadcastable to the scores; None hides nothing.
        are_biased: a bias by distance was added, which hides a key where it is minus infinity.
        dim: the dimension of the keys.
    """
    dtype = at_least_float32(scores.dtype)
    if are_biased:
        visible = both(visible, scores != -torch.inf)
    if visible is None:
        return torch.softmax(scores, dim=dim, dtype=dtype).to(scores.dtype)
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=dim, dtype=dtype).masked_fill(~visible, 0.0).to(scores.dtype)
