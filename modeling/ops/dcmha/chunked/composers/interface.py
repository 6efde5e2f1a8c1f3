"""The interface of composers, and what a chunk hands them: factors and visibility."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ....masking import Structure, split_mask


class StageFactors(NamedTuple):
    """One stage's factors for a chunk or for a whole item, or their gradients, in the order of `pack_factors`."""

    query: Tensor | None  # [c or T, terms, H]
    key: Tensor | None  # [terms, H, n or S]
    static: Tensor | None  # [H, H], indexed [in, out]
    groups: int


class ChunkVisibility(NamedTuple):
    """Tells which keys the queries of a chunk see."""

    structure: Structure
    queries: slice
    keys: slice
    mask: Tensor | None  # [H or 1, c or 1, n or 1]
    first_keys: Tensor | None  # [c], counted from the first of `keys`

    def hide(self, scores: Tensor) -> None:
        """Adds the bias of an additive mask to scores `[c, H, n]`, and sets all that are hidden to minus infinity."""
        self.structure.hide(scores.transpose(0, 1), self.queries, self.keys)
        if self.first_keys is not None:
            hidden = torch.arange(scores.shape[2], device=scores.device) < self.first_keys[..., None]
            scores.masked_fill_(hidden[:, None], -torch.inf)
        visible, bias = split_mask(self.mask)
        scores = scores.transpose(0, 1)  # [H, c, n]
        if bias is not None:
            scores += bias
        if visible is not None:
            scores.masked_fill_(~visible, -torch.inf)

    def has_empty_rows(self) -> bool:
        """Whether there can be queries that see no key."""
        has_mask = self.mask is not None or self.first_keys is not None
        return has_mask or self.structure.offset is not None or self.structure.queries > self.structure.keys


class ChunkComposer(NamedTuple):
    """The functions of one composer. Maps are `[c, H, n]`.

    `out` never shares memory with an input, and factors are contiguous.
    """

    # (out, maps, factors, scratch): writes the composition of `maps`.
    compose: Callable[[Tensor, Tensor, StageFactors, Tensor], None]
    # (out, gradient, maps, factors, sums, scratch): from the gradient of the composition, writes that of `maps` to
    # `out` and adds those of `factors` to `sums`.
    compose_backward: Callable[[Tensor, Tensor, Tensor, StageFactors, StageFactors, Tensor], None]


def split_terms(terms: Tensor, dim: int = 0) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor | None]:
    """Splits packed `terms`, such as `[terms, H, n]`, along `dim` into down terms, up terms and the gate, if any."""
    single = terms.unbind(dim)
    rank = len(single) // 2
    return single[:rank], single[rank : 2 * rank], single[-1] if len(single) % 2 else None
