"""Adds composed heads, in place, to attention modules of other libraries (DETR of Transformers, timm).

The modules are recognized by the names of their classes, so that no library is imported for it. A module keeps its
parameters, hooks and names. It gets generators of composition factors as submodules, and its class is replaced by a
subclass whose forward pass uses them.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...configuration.multihead_config import make_config
from ..layers.attention_interface import registered_implementations
from ..ops.dcmha.attention import dcmha_attention
from .side_generators import SideGenerators


class ComposedDetrSelfAttention(SideGenerators):
    """Mixed in front of DETR's self-attention, which passes keywords on to Transformers' attention interface."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As DETR's, for hidden states `[B, T, E]`.

        Factors are generated from what queries and keys are projected from: hidden states plus positions.
        """
        both = _add(hidden_states, position_embeddings)
        pre, post = self.compose(both, both)
        return super().forward(hidden_states, attention_mask, position_embeddings, pre=pre, post=post, **kwargs)


class ComposedDetrCrossAttention(SideGenerators):
    """Mixed in front of DETR's cross-attention, as `ComposedDetrSelfAttention` in front of self-attention."""

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Tensor | None = None,
        encoder_position_embeddings: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As DETR's, for hidden states `[B, T, E]` and those of the source `[B, S, E]`."""
        query = _add(hidden_states, position_embeddings)
        pre, post = self.compose(query, _add(key_value_states, encoder_position_embeddings))
        given = (hidden_states, key_value_states, attention_mask, position_embeddings, encoder_position_embeddings)
        return super().forward(*given, pre=pre, post=post, **kwargs)


class ComposedTimmAttention(SideGenerators):
    """Replaces the forward pass of timm's `Attention`, which calls PyTorch's attention directly."""

    qkv: nn.Linear
    q_norm: nn.Module
    k_norm: nn.Module
    norm: nn.Module
    proj: nn.Linear
    proj_drop: nn.Module
    num_heads: int
    implementation: str | None

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """As timm's, for `[B, T, E]`; `attn_mask` broadcasts to `[B, H, T, T]`, boolean (True: visible) or additive."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, T, D]
        pre, post = self.compose(x, x)
        output = dcmha_attention(
            self.q_norm(query),
            self.k_norm(key),
            value,
            pre=pre,
            post=post,
            attention_mask=None if is_causal else attn_mask,  # as in timm, where causality comes before a mask
            is_causal=is_causal,
            implementation=self.implementation,
        )
        output = self.norm(output.flatten(2))
        gate = getattr(self, "gate", None)  # older releases of timm have none
        if gate is not None:
            output = output * gate(x).sigmoid()
        return self.proj_drop(self.proj(output))


class Adapter(NamedTuple):
    """How the modules of one class get composed heads."""

    composed: type[SideGenerators]  # mixed in front of the class
    sizes: Callable[[Any], tuple[int, int]]  # of a module: width of its input, number of heads
    dropout: Callable[[Any], float]  # of a module: dropout of its probabilities
    prepare: Callable[[Any, str | None], None]  # gives a module an implementation of the op, and no dropout
    cross_attention: bool = False


def detr_sizes(attention: Any) -> tuple[int, int]:
    """Width of the input and number of heads."""
    return attention.q_proj.in_features, attention.q_proj.out_features // attention.head_dim


def prepare_detr(attention: Any, implementation: str | None) -> None:
    """Selects the implementation for a module of Transformers, in a copy of the configuration that others share."""
    attention.config = copy.copy(attention.config)
    # The key "" is the model itself; a plain string would also change the implementation of its backbone.
    attention.config._attn_implementation = {"": implementation or "chunked"}
    attention.attention_dropout = 0.0


def prepare_timm(attention: Any, implementation: str | None) -> None:
    """Selects the implementation; a module of a release without a norm of the output gets one that does nothing."""
    attention.implementation = implementation
    attention.attn_drop.p = 0.0
    if not hasattr(attention, "norm"):
        attention.norm = nn.Identity().train(attention.training)


DETR = "transformers.models.detr.modeling_detr"
_TIMM = Adapter(
    ComposedTimmAttention,
    lambda attention: (attention.qkv.in_features, attention.num_heads),
    lambda attention: attention.attn_drop.p,
    prepare_timm,
)
ADAPTERS: dict[str, Adapter] = {
    f"{DETR}.DetrSelfAttention": Adapter(
        ComposedDetrSelfAttention, detr_sizes, lambda attention: attention.attention_dropout, prepare_detr
    ),
    f"{DETR}.DetrCrossAttention": Adapter(
        ComposedDetrCrossAttention, detr_sizes, lambda attention: attention.attention_dropout, prepare_detr, True
    ),
    "timm.layers.attention.Attention": _TIMM,
    "timm.models.vision_transformer.Attention": _TIMM,
}


def adapter_of(module: nn.Module) -> Adapter | None:
    """The adapter for exactly the class of `module`; None for subclasses, whose forward pass may be another."""
    return ADAPTERS.get(f"{type(module).__module__}.{type(module).__qualname__}")


@functools.cache
def composed_class(composed: type, own: type) -> type:
    """The subclass of a module's class `own` that attends as `composed` does.

    `pickle` cannot find a class that is made in a function, so its objects are pickled as the two classes and their
    state.
    """

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        return _new, (composed, own), self.__getstate__()

    return type(composed.__name__, (composed, own), {"__doc__": composed.__doc__, "__reduce_ex__": reduce})


def _new(composed: type, own: type) -> Any:
    """An empty object of `composed_class`, for `pickle`."""
    return object.__new__(composed_class(composed, own))


def plan_composition(adapter: Adapter, attention: Any, options: dict[str, Any]) -> Callable[[], None]:
    """Checks the options and returns a function that adds composed heads, which start as the identity, to `attention`.

    Args:
        options: those of `compose_heads_of`.

    Raises:
        TypeError: an option does not exist.
        ValueError: an option does not fit, or the module drops probabilities.
    """
    compose: Any = dict(options)
    if dropout := compose.pop("dropout", adapter.dropout(attention)):
        raise ValueError(
            f"dropout={dropout} drops probabilities, which are never all in memory at once; use dropout=0.0"
        )
    across = compose.pop("cross_attention", adapter.cross_attention)
    implementation = compose.pop("implementation", None)
    usable = registered_implementations()
    if implementation not in (None, *usable):
        raise ValueError(f"implementation={implementation!r} cannot serve this module; use one of {usable}")
    hidden, heads = adapter.sizes(attention)
    like = next(attention.parameters())
    planned = SideGenerators()
    planned.add_generators(
        make_config(hidden, heads, None, {**compose, "compose_init_scale": 0.0}),
        cross_attention=across,
        key_size=hidden,
        device=like.device,
        dtype=like.dtype,
    )

    def apply() -> None:
        """Changes the module; everything that can be refused was checked before."""
        attention.composition, attention.key_composition = planned.composition, planned.key_composition
        adapter.prepare(attention, implementation)
        classes: tuple[Any, Any] = adapter.composed, type(attention)
        attention.__class__ = composed_class(*classes)
        planned.train(attention.training)

    return apply


def _add(states: Tensor, positions: Tensor | None) -> Tensor:
    """The sum of hidden states and positions, both `[B, T, E]`, of which the latter may be absent."""
    return states if positions is None else states + positions
