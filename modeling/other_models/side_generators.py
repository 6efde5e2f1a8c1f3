"""Generators of composition factors for an attention module whose queries and keys may come from different inputs."""

from typing import Any

import torch
from torch import Tensor, nn

from ...configuration.multihead_config import MultiheadConfig
from ..layers.head_composition import DynamicComposition, PackedFactors, init_composition, make_generators
from ..ops.dcmha.composition import Composition


class SideGenerators(nn.Module):
    """Mixed into an attention module to give it generators of factors (see `make_generators`).

    In self-attention `composition` serves both sides. In cross-attention `composition` serves queries and has the
    static matrices, and `key_composition` serves keys, if composition is key-wise.
    """

    composition: DynamicComposition | None
    key_composition: DynamicComposition | None

    def add_generators(
        self,
        config: MultiheadConfig,
        *,
        cross_attention: bool,
        key_size: int,
        device: Any,
        dtype: torch.dtype | None,
    ) -> None:
        """Makes the generators and draws their weights; there are none if the configuration composes nothing.

        Args:
            cross_attention: make one generator for each side, not one for both.
            key_size: width of the input of `key_composition`.
        """
        self.composition = self.key_composition = None
        if not config.composes:
            return
        self.composition, self.key_composition = make_generators(
            config, cross_attention=cross_attention, key_size=key_size
        )
        self._init_scale = float(config.compose_init_scale)
        for generator in self.generators():
            generator.to(device=device, dtype=dtype)
            init_composition(generator, self._init_scale)

    def generators(self) -> list[DynamicComposition]:
        """The generators that exist; may be called before the constructor has made them."""
        made = (getattr(self, name, None) for name in ("composition", "key_composition"))
        return [generator for generator in made if generator is not None]

    def compose(self, query: Tensor, key: Tensor) -> tuple[Composition | None, Composition | None]:
        """Returns (pre, post), generated from `query` `[B, T, E]` and `key` `[B, S, key_size]`."""
        if self.composition is None:
            return None, None
        return self.composition.assemble(self.generate(query, key))

    def generate(self, query: Tensor, key: Tensor) -> PackedFactors:
        """Returns the factors of both sides, from `query` `[B, T, E]` and `key` `[B, S, key_size]`."""
        assert self.composition is not None
        factors = self.composition(query)
        if self.key_composition is not None:
            factors = factors.with_keys_of(self.key_composition(key))
        elif "key" in self.composition.sides and key is not query:
            factors = factors.with_keys_of(self.composition(key))
        return factors
