"""Rows of a paged cache that hold the key-side composition factors of a token beside its key or value.

Serving engines keep two rows of `H_kv` heads for each token, one for its key and one for its value, in pages that they
allocate, share and move. Rows that are wider than `D` need no change in an engine. So here each head of a row has
`X = terms * H / H_kv` additional channels. Those of all heads of a row, one head after the other, are the packed terms
`[terms, H]` of the token: of the stage `pre` in rows of keys, of the stage `post` in rows of values.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ops.dcmha.attention import Attention
from ..ops.dcmha.composition import Composition, pack_side, unpack_factors
from ..ops.dcmha.triton.attention import dcmha_triton

# The width of rows is a multiple of this number, by implementation of attention: Triton's kernels load several channels
# at once only if they know that every row begins at a multiple of 16.
ALIGNMENT: dict[Attention, int] = {dcmha_triton: 16}


@dataclass(frozen=True)
class RowLayout:
    """The sizes of a row `[H_kv, width]`; packs keys or values and terms into rows, and unpacks them."""

    heads: int  # H
    kv_heads: int  # H_kv
    head_dim: int  # D
    terms: int  # number of key-side terms of one stage: 2R factors and a gate; 0 if no factors depend on the key
    padding: int = 0  # unused channels at the end of each head

    @property
    def extra(self) -> int:
        """The number of channels of a head that hold terms."""
        return self.terms * self.heads // self.kv_heads

    @property
    def width(self) -> int:
        """The number of channels of a head; engines take it for the width of heads."""
        return self.head_dim + self.extra + self.padding

    def pack(self, states: Tensor, stage: Composition | None) -> Tensor:
        """Returns rows `[B, T, H_kv, width]`.

        Args:
            states: keys or values `[B, T, H_kv, D]`.
            stage: the stage whose key-side terms, those of the same `T` tokens, are put behind keys or values.
        """
        terms = None if stage is None else pack_side(stage, "key")  # [B, T, terms, H]
        if terms is None:
            return pad(states, (0, self.width - self.head_dim))
        rows = torch.cat([states, terms.reshape(*states.shape[:-1], self.extra)], dim=-1)
        return pad(rows, (0, self.padding)) if self.padding else rows

    def unpack(self, rows: Tensor, stage: Composition | None) -> tuple[Tensor, Composition | None]:
        """Unpacks rows `[B, S, H_kv, width]`.

        Args:
            stage: the stage whose terms are in the rows, with the factors of some queries.

        Returns:
            Keys or values `[B, S, H_kv, D]`, as a view, and the stage with the key-side factors of the `S` tokens.
        """
        states, channels, _ = rows.split([self.head_dim, self.extra, self.padding], dim=-1)
        if stage is None or not self.terms:
            return states, stage
        terms = channels.reshape(*rows.shape[:-2], self.terms, self.heads)
        return states, unpack_factors({"query": pack_side(stage, "query"), "key": terms}, stage.static, stage.groups)
