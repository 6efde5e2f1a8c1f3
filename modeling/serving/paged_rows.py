"""Rows of a paged cache that hold the key-side composition factors of their token beside its keys and values.

Serving engines keep a row of `H_kv` heads for the keys of a token, and one for its values, in pages that they allocate,
share and move. A row that is wider than `D` needs nothing new of an engine. Here each head of a row has
`X = terms * H / H_kv` more channels. Those of all heads of a row, one head after the other, are the packed terms
`[terms, H]` of the token: behind the keys those of the stage `pre`, behind the values those of `post`.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ops.dcmha.composition import Composition, pack_side, unpack_factors

# What the width of rows is a multiple of, by implementation: kernels of Triton load several channels at once only where
# they are told that every row begins at a multiple of 16.
ALIGNMENT = {"triton": 16}


@dataclass(frozen=True)
class RowLayout:
    """The sizes of a row `[H_kv, width]`, and the way from keys or values and terms to rows and back."""

    heads: int  # H
    kv_heads: int  # H_kv
    head_dim: int  # D
    terms: int  # of the key side of one stage: 2R factors and a gate; 0 if no factors depend on the key
    padding: int = 0  # unused channels at the end of each head

    @property
    def extra(self) -> int:
        """Channels of a head that hold terms."""
        return self.terms * self.heads // self.kv_heads

    @property
    def width(self) -> int:
        """Channels of a head: what an engine takes for the width of heads."""
        return self.head_dim + self.extra + self.padding

    def pack(self, states: Tensor, stage: Composition | None) -> Tensor:
        """Returns rows `[B, T, H_kv, width]`.

        Args:
            states: keys or values `[B, T, H_kv, D]`.
            stage: the composition of the stage whose terms go behind them, with the factors of the same `T` tokens.
        """
        terms = None if stage is None else pack_side(*stage.side("key"))  # [B, T, terms, H]
        if terms is None:
            return pad(states, (0, self.width - self.head_dim))
        rows = torch.cat([states, terms.reshape(*states.shape[:-1], self.extra)], dim=-1)
        return pad(rows, (0, self.padding)) if self.padding else rows

    def unpack(self, rows: Tensor, stage: Composition | None) -> tuple[Tensor, Composition | None]:
        """Returns the keys or values `[B, S, H_kv, D]` of rows `[B, S, H_kv, width]`, as a view, and their stage.

        Args:
            stage: the composition of the same stage with the factors of some queries. It is returned with the factors
                of the `S` tokens on the side of the keys.
        """
        states, channels, _ = rows.split([self.head_dim, self.extra, self.padding], dim=-1)
        if stage is None or not self.terms:
            return states, stage
        terms = channels.reshape(*rows.shape[:-2], self.terms, self.heads)
        key_side = unpack_factors({"key": terms})
        return states, replace(stage, key_down=key_side.key_down, key_up=key_side.key_up, key_gate=key_side.key_gate)


def row_layout(config: Any) -> RowLayout:
    """Returns the layout of the rows of a model of any DCMHA family, by its `ComposedConfig`."""
    terms = 2 * config.compose_rank * config.compose_low_rank + config.compose_gate if config.composes_keys else 0
    layout = RowLayout(config.num_attention_heads, config.num_key_value_heads, config.head_dim, terms)
    return replace(layout, padding=-layout.width % ALIGNMENT.get(config._attn_implementation, 1))
