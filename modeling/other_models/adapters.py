"""Adds composed heads, in place, to attention modules of other libraries (Transformers, timm).

A module keeps its parameters, hooks and names. It gets generators of composition factors as submodules, and its class
is replaced by a subclass whose forward pass uses them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...configuration.multihead_config import make_config
from ..ops.dcmha.attention import dcmha_attention, resolve_implementation
from .interface_attention import Choices, ComposedInterfaceAttention
from .interface_function import COMPOSED_HEADS
from .interface_modules import (
    calls_interface,
    dropout_error,
    interface_dropout,
    interface_sizes,
    is_cross_attention,
    refuse_foreign_parts,
)
from .side_generators import SideGenerators


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
    """How the modules of one class, or of one kind, get composed heads."""

    composed: type[SideGenerators]  # mixed in front of the class
    sizes: Callable[[Any], tuple[int, int, int]]  # of a module: widths of queries' and keys' inputs, number of heads
    dropout: Callable[[Any], float]  # of a module: dropout of its probabilities
    prepare: Callable[[Any, Choices], None]  # changes what a module of the new class needs
    crosses: Callable[[str, Any], bool]  # of a module and its name: whether it is cross-attention


def timm_sizes(attention: Any) -> tuple[int, int, int]:
    """Widths of the inputs, and number of heads."""
    width = attention.qkv.in_features
    return width, width, attention.num_heads


def prepare_timm(attention: Any, choices: Choices) -> None:
    """Selects the implementation; a module of a release without a norm of the output gets one that does nothing."""
    attention.implementation = choices.implementation
    attention.attn_drop.p = 0.0
    if not hasattr(attention, "norm"):
        attention.norm = nn.Identity().train(attention.training)


def prepare_interface(attention: ComposedInterfaceAttention, choices: Choices) -> None:
    """Makes a module of Transformers call `attend_with_composed_heads`."""
    attention.switch_on(choices, COMPOSED_HEADS)


_TIMM = Adapter(
    ComposedTimmAttention,
    timm_sizes,
    lambda attention: attention.attn_drop.p,
    prepare_timm,
    lambda name, attention: False,
)
# By the name of the class, so that no library is imported for it.
ADAPTERS: dict[str, Adapter] = {
    "timm.layers.attention.Attention": _TIMM,
    "timm.models.vision_transformer.Attention": _TIMM,
}
# For every class that calls Transformers' attention interface.
INTERFACE = Adapter(
    ComposedInterfaceAttention,
    interface_sizes,
    interface_dropout,
    prepare_interface,
    is_cross_attention,
)


def adapter_of(module: nn.Module) -> Adapter | None:
    """The adapter for a module; None for one that is not known, or that composes heads already.

    Those of `ADAPTERS` are for exactly these classes and for no subclasses, whose forward pass may be another.
    """
    known = ADAPTERS.get(f"{type(module).__module__}.{type(module).__qualname__}")
    is_plain = not isinstance(module, SideGenerators)
    return INTERFACE if known is None and is_plain and calls_interface(module) else known


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


def plan_composition(adapter: Adapter, name: str, attention: Any, options: dict[str, Any]) -> Callable[[], None]:
    """Checks the options and returns a function that adds composed heads, which start as the identity, to `attention`.

    Args:
        name: that of the module in its model.
        options: those of `compose_heads_of`.

    Raises:
        TypeError: an option does not exist.
        ValueError: an option does not fit, or the module drops probabilities.
    """
    refuse_foreign_parts(attention)
    compose: Any = dict(options)
    given = compose.pop("dropout", None)
    if dropout := adapter.dropout(attention) if given is None else given:
        raise ValueError(dropout_error(dropout))
    choices = Choices(compose.pop("implementation", None), given is None, adapter.crosses(name, attention))
    across = compose.pop("cross_attention", choices.crosses)
    resolve_implementation(choices.implementation, composed=True)
    width, key_width, heads = adapter.sizes(attention)
    if heads == 1:
        raise ValueError("attention with one head has none to compose it with; leave it out by names=[...]")
    weights = sorted(attention.parameters(), key=torch.numel, reverse=True)  # a projection first
    dtype = next((one.dtype for one in weights if one.is_floating_point()), torch.get_default_dtype())
    planned = SideGenerators()
    planned.add_generators(
        make_config(width, heads, None, {**compose, "compose_init_scale": 0.0}, head_dim=1),  # which nothing reads
        cross_attention=across or width != key_width,
        key_size=key_width,
        device=weights[0].device,
        dtype=dtype,  # not that of quantized weights
    )

    def apply() -> None:
        """Changes the module; everything that can be refused was checked before."""
        attention.composition, attention.key_composition = planned.composition, planned.key_composition
        classes: tuple[Any, Any] = adapter.composed, type(attention)
        attention.__class__ = composed_class(*classes)
        adapter.prepare(attention, choices)
        planned.train(attention.training)

    return apply
