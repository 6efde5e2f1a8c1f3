"""The generator of the factors with which a layer composes its attention heads."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.activations import ACT2FN

from ..ops.autocast import without_autocast
from ..ops.dcmha.composition import SIDES, Composition, unpack_factors
from .rms_norm import rms_norm
from .tensor_parallel import GROUP_DIMENSIONS


class PackedFactors(NamedTuple):
    """What `DynamicComposition` generates: the packed terms of each stage and side, None for one without terms.

    It is a tuple because PyTorch calls full backward hooks only for modules that return tensors or tuples of them.
    """

    pre_query: Tensor | None = None  # [B, T, terms, H]
    pre_key: Tensor | None = None  # [B, S, terms, H]
    post_query: Tensor | None = None  # [B, T, terms, H]
    post_key: Tensor | None = None  # [B, S, terms, H]
    static: Tensor | None = None  # [P, H, H], block-diagonal

    @property
    def heads(self) -> int | None:
        """The number of heads, under tensor parallelism of those of this process; None without any terms."""
        present = [terms for terms in self if terms is not None]
        return int(present[0].shape[-1]) if present else None

    @property
    def keys(self) -> Tensor | None:
        """The terms of the key side of all stages as caches keep them, `[B, P * terms, S, H]`; None without any."""
        stages = [terms.transpose(1, 2) for terms in (self.pre_key, self.post_key) if terms is not None]
        return torch.cat(stages, dim=1) if stages else None

    def with_keys(self, keys: Tensor, stages: Sequence[str]) -> "PackedFactors":
        """Returns the same factors with the terms `keys` `[B, P * terms, S, H]` on the key side of `stages`."""
        parts = keys.transpose(1, 2).chunk(len(stages), dim=2)
        return self._replace(**{f"{stage}_key": part for stage, part in zip(stages, parts, strict=True)})

    def with_keys_of(self, other: "PackedFactors") -> "PackedFactors":
        """Returns the same factors with the key side of `other`, which was generated from other tokens."""
        return self._replace(pre_key=other.pre_key, post_key=other.post_key)

    def behind_sink(self) -> "PackedFactors":
        """Returns the same factors with a token before those of the key side that has none."""
        pre, post = (None if one is None else F.pad(one, (0, 0, 0, 0, 1, 0)) for one in (self.pre_key, self.post_key))
        return self._replace(pre_key=pre, post_key=post)

    def up_to(self, length: int) -> "PackedFactors":
        """Returns the same factors with the first `length` tokens of the key side."""
        pre, post = (None if terms is None else terms[:, :length] for terms in (self.pre_key, self.post_key))
        return self._replace(pre_key=pre, post_key=post)


class DynamicComposition(nn.Module):
    """Generates the composition factors of both stages from the input of attention (DCMHA, arXiv 2405.08553).

    A *component* is one stage (pre, post) for one side (query, key), in the order pre-query, pre-key, post-query,
    post-key; `C` is the number of components that are switched on. A component has up to `2R + 1` *terms* of `H`
    elements for each token, packed in this order: `R` down factors (normalized over heads), `R` up factors, and a gate.

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
        static: bool = True,
    ) -> None:
        """Allocates the weights; `init_composition` draws them.

        Cross-attention has two generators: one with `sides=("query",)` and the static matrices reads queries, one with
        `sides=("key",)` and without them reads keys.

        Args:
            sides: the sides (query, key) whose terms are generated, by default all that the configuration composes.
            input_size: width of the input of `forward`, by default the hidden size.
            static: whether this generator holds the static matrices, if the configuration has any.
        """
        super().__init__()
        self.stages, self.sides = config.compose_stages, config.compose_sides if sides is None else sides
        self.groups, self.num_heads = config.compose_groups, config.num_attention_heads  # of all processes
        self.rank = config.compose_rank if config.compose_low_rank else 0
        self.has_gate, self.eps = config.compose_gate, config.compose_norm_eps
        self.act_fn = ACT2FN[config.compose_act]
        # A call of `nn.Dropout` takes time in each decoding step, even if it drops nothing.
        self.dropout = nn.Dropout(config.compose_dropout) if config.compose_dropout else nn.Identity()
        self.group_size = heads = self.num_heads // self.groups
        width = config.compose_hidden_size or 2 * config.compose_rank * heads
        self.components = components = len(self.stages) * len(self.sides)
        input_size = config.hidden_size if input_size is None else input_size
        for name in GROUP_DIMENSIONS:
            self.register_parameter(name, None)
        if components and self.rank:
            self.hidden_weight = nn.Parameter(torch.empty(input_size, self.groups, components, width))
            self.factor_weight = nn.Parameter(torch.empty(self.groups, components, width, 2 * self.rank, heads))
        if components and self.has_gate:
            self.gate_weight = nn.Parameter(torch.empty(input_size, self.groups, components, heads))
        if config.compose_static and static:
            self.static_weight = nn.Parameter(torch.empty(len(self.stages), self.groups, heads, heads))

    def forward(self, hidden_states: Tensor) -> PackedFactors:
        """Returns the packed terms of each component, `[B, T, terms, H]`, from `hidden_states` `[B, T, E]`.

        With them, as `static`, come copies of `static_weight` as matrices: a module whose weights are offloaded, or
        sharded for itself, has them only in this call.
        """
        static = None
        if self.static_weight is not None:
            with without_autocast(hidden_states.device):  # under autocast `stack` raises for the other half precision
                static = torch.stack([torch.block_diag(*blocks) for blocks in self.static_weight])
        if not self.sides:
            return PackedFactors(static=static)
        terms = []
        if self.factor_weight is not None:
            terms += self._low_rank_terms(hidden_states)
        if self.gate_weight is not None:
            terms.append(self._gates(hidden_states))
        # All components are packed and their groups joined at once, since few operations make a training step short.
        packed = torch.cat(terms, dim=3).unflatten(0, (-1, self.components))  # [G, C, B, T, terms, H/G]
        components = packed.permute(1, 2, 3, 4, 0, 5).flatten(4).unbind(0)
        names = [f"{stage}_{side}" for stage in self.stages for side in self.sides]
        return PackedFactors(**dict(zip(names, components, strict=True)), static=static)

    def assemble(self, factors: PackedFactors) -> tuple[Composition | None, Composition | None]:
        """Returns (pre, post) for `dcmha_attention` from what `forward` returned for queries and for keys."""
        compositions: dict[str, Composition] = {}
        groups = (factors.heads or self.num_heads) // self.group_size  # of this process
        for index, stage in enumerate(self.stages):
            static = None if factors.static is None else factors.static[index]
            packed = {side: getattr(factors, f"{stage}_{side}") for side in SIDES}
            compositions[stage] = unpack_factors(packed, static, groups)
        return compositions.get("pre"), compositions.get("post")

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """As in PyTorch, where `to`, `half` and others convert all weights by it; these keep their memory format."""
        return super()._apply(lambda weight: _in_own_format(fn, weight), recurse)

    def _low_rank_terms(self, hidden_states: Tensor) -> list[Tensor]:
        """Down and up factors, `[G * C, B, T, R, H/G]` each, of `[B, T, E]`; down has unit mean square."""
        hidden = self.dropout(self.act_fn(hidden_states @ self.hidden_weight.flatten(1)))
        # Groups and components are joined to one dimension, since the gradient of the weight then has the strides of
        # the weight, and DistributedDataParallel warns about a copy otherwise.
        weight = self.factor_weight.flatten(0, 1)
        hidden = hidden.flatten(0, 1).unflatten(-1, weight.shape[:2]).transpose(0, 1)  # [G * C, B * T, K]
        # `einsum` computes the same, but arranging it takes longer than the product of a decoding step.
        factors = torch.bmm(hidden, weight.flatten(2)).view(len(weight), *hidden_states.shape[:2], *weight.shape[2:])
        down, up = factors.split_with_sizes((self.rank, self.rank), dim=3)
        return [rms_norm(down, self.eps), up]

    def _gates(self, hidden_states: Tensor) -> Tensor:
        """Gates `[G * C, B, T, 1, H/G]` of `[B, T, E]`."""
        gates = self.dropout(torch.tanh(hidden_states @ self.gate_weight.flatten(1)))
        return gates.unflatten(-1, (-1, 1, self.gate_weight.shape[-1])).permute(2, 0, 1, 3, 4)


def _in_own_format(convert: Callable[..., Any], weight: Tensor) -> Any:
    """What `convert` makes of a weight, which stays out of `channels_last` and other memory formats of images.

    `to(memory_format=...)` of a model asks for one in all weights of four and of five dimensions, and every such format
    fails for one of these two.
    """
    try:
        converted = convert(weight)
    except RuntimeError as error:
        if "channels_last" not in str(error):
            raise
        converted = convert(weight.flatten()).view(weight.shape)
    return converted.contiguous() if weight.is_contiguous() else converted


def make_generators(
    config: PreTrainedConfig, *, cross_attention: bool, key_size: int | None = None
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
    heads = module.group_size
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
