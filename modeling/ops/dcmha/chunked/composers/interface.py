"""The interface between a chunk's arithmetic and what composes its maps."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ....masking import Structure, split_mask


class Stage(NamedTuple):
    """One stage's factors, or their gradients, in packed rows: `R` down, `R` up and, if they are odd, a gate."""

    query: Tensor | None  # [b, c, rows, H]
    key: Tensor | None  # [b, rows, H, n]
    static: Tensor | None  # [H, H], indexed [in, out]
    groups: int

    @property
    def heads(self) -> int:
        """`H`."""
        places = ((self.query, 3), (self.key, 2), (self.static, 0))
        return next(rows.shape[dim] for rows, dim in places if rows is not None)

    def of_one_item(self) -> "Stage":
        """The same without `b`, which is 1."""
        query, key = (None if rows is None else rows.squeeze(0) for rows in (self.query, self.key))
        return self._replace(query=query, key=key)


class Sight(NamedTuple):
    """Which keys the chunk's queries see."""

    items: int  # b
    structure: Structure
    queries: slice
    keys: slice
    mask: Tensor | None  # [b or 1, H or 1, c or 1, n or 1]
    first_keys: Tensor | None  # [b, c], counted from the first of `keys`

    def by_item(self, maps: Tensor) -> Tensor:
        """`[c, bH, n]` to `[b, H, c, n]`, a view."""
        return maps.unflatten(1, (self.items, -1)).permute(1, 2, 0, 3)

    def hide_by_position(self, scores: Tensor) -> None:
        """Sets what positions alone hide to minus infinity."""
        for edge in self.structure.edges(self.queries, self.keys):
            hidden = ~self.structure.visible(self.queries, edge, scores.device)
            columns = slice(edge.start - self.keys.start, edge.stop - self.keys.start)
            scores[:, :, columns].masked_fill_(hidden[:, None], -torch.inf)
        if self.first_keys is not None:
            hidden = torch.arange(scores.shape[2], device=scores.device) < self.first_keys[..., None]
            self.by_item(scores).masked_fill_(hidden[:, None], -torch.inf)

    def hide_by_mask(self, scores: Tensor) -> None:
        """Adds what the mask adds, and sets what it hides to minus infinity."""
        if self.mask is None:
            return
        visible, bias = split_mask(self.mask)
        scores = self.by_item(scores)
        if bias is not None:
            scores += bias
        if visible is not None:
            scores.masked_fill_(~visible, -torch.inf)

    def has_empty_rows(self) -> bool:
        """Whether there can be queries that see nothing."""
        given = self.mask is not None or self.first_keys is not None
        return given or self.structure.queries > self.structure.keys


class Composer(NamedTuple):
    """The face of all ways to work on a chunk's maps.

    To an `in_place` composer `out` is what it is made of: the maps, or the gradient (but the backward pass has another
    `out` for `compose`). Maps then lie in memory as matrix products leave them, `[bH, c, n]`, and factors of keys are
    parts of longer rows. To others `out` is always another buffer `[c, H, n]` of one item, and factors are contiguous.
    """

    # (out, maps, stage, scratch): writes the composition of `maps`.
    compose: Callable[[Tensor, Tensor, Stage, Tensor], None]
    # (out, gradient, maps, stage, sums, scratch): writes the gradient of `maps`, given that of their composition; adds
    # those of the factors to `sums`.
    compose_backward: Callable[[Tensor, Tensor, Tensor, Stage, Stage, Tensor], None]
    # (out, scores, sight): writes the probabilities; may overwrite the scores. Rows with nothing to see become zero.
    softmax: Callable[[Tensor, Tensor, Sight], None]
    # (out, gradient, probs, sight): writes the gradient of the composed scores.
    softmax_backward: Callable[[Tensor, Tensor, Tensor, Sight], None]
    in_place: bool


def split_rows(rows: Tensor, dim: int = 0) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor | None]:
    """Returns the down rows, the up rows and the gate of packed rows."""
    single = rows.unbind(dim)
    rank = len(single) // 2
    return single[:rank], single[rank : 2 * rank], single[-1] if len(single) % 2 else None
