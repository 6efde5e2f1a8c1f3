"""Attention modules of other libraries, to which composed heads are added in place.

Their classes are known by name, so that nothing is imported for them. A module keeps its parameters, hooks and names.
It gets generators of factors beside them, and a class in front of its own that makes use of them.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...configuration.multihead_config import make_config
from ..ops.dcmha.attention import dcmha_attention
from .composed_attention import COMPOSING  # from where they are registered with Transformers
from .side_generators import SideGenerators


class ComposedDetrSelfAttention(SideGenerators):
    """In front of DETR's self-attention, which hands keywords on to the attention interface of Transformers."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As DETR's, of `[B, T, E]`; factors come from what queries and keys are projected from, positions included."""
        both = _add(hidden_states, position_embeddings)
        pre, post = self.compose(both, both)
        return super().forward(hidden_states, attention_mask, position_embeddings, pre=pre, post=post, **kwargs)


class ComposedDetrCrossAttention(SideGenerators):
    """In front of DETR's cross-attention, as `ComposedDetrSelfAttention`."""

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Tensor | None = None,
        encoder_position_embeddings: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As DETR's, of `[B, T, E]` and `[B, S, E]`."""
        query = _add(hidden_states, position_embeddings)
        pre, post = self.compose(query, _add(key_value_states, encoder_position_embeddings))
        given = (hidden_states, key_value_states, attention_mask, position_embeddings, encoder_position_embeddings)
        return super().forward(*given, pre=pre, post=post, **kwargs)


class ComposedTimmAttention(SideGenerators):
    """In the place of the forward pass of timm's `Attention`, which calls PyTorch's attention itself."""

    qkv: nn.Linear
    q_norm: nn.Module
    k_norm: nn.Module
    norm: nn.Module
    proj: nn.Linear
    proj_drop: nn.Module
    num_heads: int
    scale: float
    implementation: str | None

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """As timm's, of `[B, T, E]`; `attn_mask` broadcasts to `[B, H, T, T]`, boolean (True = visible) or additive."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, T, D]
        pre, post = self.compose(x, x)
        output = dcmha_attention(
            self.q_norm(query),
            self.k_norm(key),
            value,
            pre=pre,
            post=post,
            scaling=self.scale,
            attention_mask=None if is_causal else attn_mask,
            is_causal=is_causal,
            implementation=self.implementation,
        )
        output = self.norm(output.flatten(2))
        gate = getattr(self, "gate", None)  # which older releases do not have
        if gate is not None:
            output = output * gate(x).sigmoid()
        return self.proj_drop(self.proj(output))


class Adapter(NamedTuple):
    """How a class of modules gets composed heads."""

    composed: type[SideGenerators]
    sizes: Callable[[Any], tuple[int, int]]  # of a module: width of its input, heads
    dropout: Callable[[Any], float]  # of a module's probabilities
    prepare: Callable[[Any, str | None], None]  # makes a module use an implementation of the op, and drop nothing
    cross_attention: bool = False


def detr_sizes(attention: Any) -> tuple[int, int]:
    """Width of the input and number of heads."""
    return attention.q_proj.in_features, attention.q_proj.out_features // attention.head_dim


def prepare_detr(attention: Any, implementation: str | None) -> None:
    """Gives a module of Transformers a configuration of its own, with our implementation in it alone."""
    attention.config = copy.copy(attention.config)
    attention.config._attn_implementation = {"": implementation or "chunked"}  # "": not those of its backbone
    attention.attention_dropout = 0.0


def prepare_timm(attention: Any, implementation: str | None) -> None:
    """Names the implementation; releases that have no norm of the output get one that does nothing."""
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
    """The adapter for the class of `module`, but for none of its sub-classes."""
    return ADAPTERS.get(f"{type(module).__module__}.{type(module).__qualname__}")


@functools.cache
def composed_class(composed: type, own: type) -> type:
    """The class `own` of a module with the attention of `composed`. Its objects are pickled by these two classes."""

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        return _new, (composed, own), self.__getstate__()

    return type(composed.__name__, (composed, own), {"__doc__": composed.__doc__, "__reduce_ex__": reduce})


def _new(composed: type, own: type) -> Any:
    """An empty object of `composed_class`, for `pickle`."""
    return object.__new__(composed_class(composed, own))


def plan_composition(adapter: Adapter, attention: Any, options: dict[str, Any]) -> Callable[[], None]:
    """Returns a function that adds composed heads, which start as the identity, to `attention`.

    Args:
        options: of `compose_heads_of`.

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
    usable = tuple(name for name in COMPOSING if name != "eager")  # Transformers has a function of its own by that name
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
        """Changes the module."""
        attention.composition, attention.key_composition = planned.composition, planned.key_composition
        adapter.prepare(attention, implementation)
        classes: tuple[Any, Any] = adapter.composed, type(attention)
        attention.__class__ = composed_class(*classes)
        planned.train(attention.training)

    return apply


def _add(states: Tensor, positions: Tensor | None) -> Tensor:
    """`[B, T, E]` twice, of which the second may be absent."""
    return states if positions is None else states + positions
