"""The generator of the factors with which a layer composes its attention heads."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.activations import ACT2FN

from ..ops.dcmha.composition import Composition, unpack_factors
from .rms_norm import rms_norm


class PackedFactors(NamedTuple):
    """What `DynamicComposition` generates; a side that the configuration does not compose is None.

    It is a tuple because PyTorch calls full backward hooks only for modules that return tensors or tuples of them.
    """

    query: Tensor | None = None  # [B, P * terms, T, H]
    key: Tensor | None = None  # [B, P * terms, S, H]
    static: Tensor | None = None  # [P, H, H], block-diagonal


class DynamicComposition(nn.Module):
    """Generates the composition factors of both stages from the normalized attention input (DCMHA, arXiv 2405.08553).

    A *component* is one stage (pre, post) for one side (query, key), in the order pre-query, pre-key, post-query,
    post-key; `C` is the number of components that are switched on. A component has `2R + 1` *terms* of `H` elements for
    each token, packed in this order: `R` down factors (normalized over heads), `R` up factors, and a gate. The cache
    keeps the terms of the key side in this packed form.

    Weights (shapes of the official checkpoints; `G` groups of `H/G` heads, `P` stages):
        hidden_weight: `[E, G, C, K]`.
        factor_weight: `[G, C, K, 2R, H/G]`; the first `R` of `2R` give the down factors.
        gate_weight: `[E, G, C, H/G]`.
        static_weight: `[P, G, H/G, H/G]`, indexed [stage, group, in, out].
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        sides: tuple[str, ...] | None = None,
        input_size: int | None = None,
        static: bool | None = None,
    ) -> None:
        """Allocates the weights; `init_composition` draws them.

        Cross-attention has two generators: one with `sides=("query",)` and the static matrices reads queries, one with
        `sides=("key",)` and without them reads keys.

        Args:
            sides: the sides (query, key) whose terms are generated, by default all that the configuration composes.
            input_size: width of the input of `forward`, by default the hidden size.
            static: whether this generator holds the static matrices, by default as configured.
        """
        super().__init__()
        self.stages, self.sides = config.compose_stages, config.compose_sides if sides is None else sides
        self.groups, self.num_heads = config.compose_groups, config.num_attention_heads
        self.rank = config.compose_rank if config.compose_low_rank else 0
        self.has_gate, self.eps = config.compose_gate, config.compose_norm_eps
        self.act_fn = ACT2FN[config.compose_act]
        self.dropout = nn.Dropout(config.compose_dropout)
        heads = self.num_heads // self.groups  # of one group
        width = config.compose_hidden_size or 2 * config.compose_rank * heads
        components = len(self.stages) * len(self.sides)
        input_size = config.hidden_size if input_size is None else input_size
        for name in ("hidden_weight", "factor_weight", "gate_weight", "static_weight"):
            self.register_parameter(name, None)
        if components and self.rank:
            self.hidden_weight = nn.Parameter(torch.empty(input_size, self.groups, components, width))
            self.factor_weight = nn.Parameter(torch.empty(self.groups, components, width, 2 * self.rank, heads))
        if components and self.has_gate:
            self.gate_weight = nn.Parameter(torch.empty(input_size, self.groups, components, heads))
        if config.compose_static if static is None else static:
            self.static_weight = nn.Parameter(torch.empty(len(self.stages), self.groups, heads, heads))

    @property
    def num_terms(self) -> int:
        """Number of terms of one component: `2R` factors and a gate, as far as they are switched on."""
        return 2 * self.rank + int(self.has_gate)

    def forward(self, hidden_states: Tensor) -> PackedFactors:
        """Returns the packed factors of each side, `[B, P * terms, T, H]`, from `hidden_states` `[B, T, E]`.

        With them, as `static`, come copies of `static_weight` as matrices: a module whose weights are offloaded, or
        sharded for itself, has them only in this call.
        """
        static = None
        if self.static_weight is not None:
            static = torch.stack([torch.block_diag(*blocks) for blocks in self.static_weight])
        if not self.sides:
            return PackedFactors(static=static)
        packed = []
        if self.factor_weight is not None:
            packed += [self._low_rank_factors(hidden_states)]
        if self.gate_weight is not None:
            gates = self.dropout(torch.tanh(hidden_states @ self.gate_weight.flatten(1)))  # [B, T, G * C * H/G]
            gates = gates.unflatten(-1, self.gate_weight.shape[1:])
            packed += [gates.permute(0, 3, 1, 2, 4).flatten(3)[:, :, None]]  # [B, C, 1, T, H]
        factors = torch.cat(packed, dim=2)  # [B, C, terms, T, H]
        by_side = factors.unflatten(1, (len(self.stages), len(self.sides))).unbind(2)
        sides = {side: terms.flatten(1, 2) for side, terms in zip(self.sides, by_side, strict=True)}
        return PackedFactors(**sides, static=static)

    def assemble(self, factors: PackedFactors) -> tuple[Composition | None, Composition | None]:
        """Returns (pre, post) for `dcmha_attention` from what `forward` returned for queries and for keys."""
        sides = {"query": factors.query, "key": factors.key}
        terms = {name: self._by_stage(side) for name, side in sides.items() if side is not None}
        compositions: dict[str, Composition] = {}
        for index, stage in enumerate(self.stages):
            static = None if factors.static is None else factors.static[index]
            packed = {name: of_stages[index] for name, of_stages in terms.items()}
            compositions[stage] = unpack_factors(packed, static, self.groups)
        return compositions.get("pre"), compositions.get("post")

    def _low_rank_factors(self, hidden_states: Tensor) -> Tensor:
        """Down and up factors `[B, C, 2R, T, H]` of `[B, T, E]`; down has unit mean square over a group's heads."""
        hidden = self.dropout(self.act_fn(hidden_states @ self.hidden_weight.flatten(1)))
        # Groups and components are joined to one dimension, since the gradient of the weight then has the strides of
        # the weight, and DistributedDataParallel warns about a copy otherwise.
        products = self.factor_weight.flatten(0, 1)
        hidden = hidden.unflatten(-1, products.shape[:2])
        factors = torch.einsum("btpk,pkrh->pbtrh", hidden, products)
        down, up = factors.split(self.rank, dim=3)
        factors = torch.cat([rms_norm(down, self.eps), up], dim=3)
        return factors.unflatten(0, self.factor_weight.shape[:2]).permute(2, 1, 4, 3, 0, 5).flatten(4)

    def _by_stage(self, side: Tensor) -> tuple[Tensor, ...]:
        """The terms `[B, T or S, terms, H]` of each stage, as views of a side's `[B, P * terms, T or S, H]`."""
        return side.unflatten(1, (len(self.stages), self.num_terms)).transpose(2, 3).unbind(1)


def make_generators(
    config: PreTrainedConfig, *, cross_attention: bool = False, key_size: int | None = None
) -> tuple[DynamicComposition, DynamicComposition | None]:
    """Returns the generators of an attention layer that composes heads: `composition` and `key_composition`.

    In self-attention the first serves both sides, and there is no second. In cross-attention the first serves queries
    and has the static matrices, and the second serves keys, if composition is key-wise.

    Args:
        key_size: width of the second generator's input, by default the hidden size.
    """
    if not cross_attention:
        return DynamicComposition(config), None
    query_sides = tuple(side for side in config.compose_sides if side == "query")
    keys = None
    if config.composes_keys:
        keys = DynamicComposition(config, sides=("key",), input_size=key_size, static=False)
    return DynamicComposition(config, sides=query_sides), keys


@torch.no_grad()
def init_composition(module: DynamicComposition, scale: float) -> None:
    """Draws the initial weights of the official JAX trainer, with up factors, gates and static mixing times `scale`.

    With `scale` 0 the composition starts as the identity. Even then the weights of the down factors are not zero, so
    that gradients reach the up factors through them; a generator whose weights are all zero would never learn.
    """
    heads = module.num_heads // module.groups
    if module.factor_weight is not None:
        width = module.hidden_weight.shape[-1]
        init.normal_(module.hidden_weight, std=math.sqrt(2 / (module.hidden_weight.shape[0] + width)))
        factors = torch.empty_like(module.factor_weight).normal_(std=0.02 / ((heads + module.rank) * math.sqrt(width)))
        factors[..., module.rank :, :] *= scale
        init.copy_(module.factor_weight, factors)
    if module.gate_weight is not None:
        init.normal_(module.gate_weight, std=scale * 0.005 * math.sqrt(2 / (module.gate_weight.shape[0] + heads)))
    if module.static_weight is not None:
        init.normal_(module.static_weight, std=scale * 0.1 / math.sqrt(heads))
