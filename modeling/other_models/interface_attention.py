"""Composed heads in attention modules of Transformers that call a function of its attention interface.

Nearly all of its models attend so. A module projects queries and keys by submodules of its own, updates the cache, and
passes queries, keys, values and the mask to the function that its configuration names. Composed heads need two things
more: what queries and keys are projected from, which hooks on the projections note, and a function that composes.
"""

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache, EncoderDecoderCache

from ..caches.composed_cache import upgrade_layer
from ..layers.attention_interface import FOREIGN_TERMS, attention_function_of, registered_implementations
from ..layers.head_composition import PackedFactors
from ..ops.custom_operators import NAMESPACE
from ..ops.dcmha.attention import COMPOSING_IMPLEMENTATIONS, choose_implementation
from ..ops.dcmha.composition import Composition
from ..ops.dcmha.key_source import KeySource
from ..ops.distance_tables import NO_TABLES
from ..ops.masking import four_dimensional
from ..serving.paged_attention import CURRENT
from .attention_sinks import with_sink_key, with_visible_sink
from .interface_modules import dropout_error, projections_of
from .side_generators import SideGenerators

# The name of the attention function in the configurations of composed modules. Other copies of this code, which came
# with models, register functions of their own.
NAME = f"{NAMESPACE}_composed_heads"


class Choices(NamedTuple):
    """What was chosen for an attention module that gets composed heads."""

    implementation: str | None  # of `dynattn.dcmha_attention`; None takes the default
    drops: bool  # whether the module's own dropout of probabilities stays, which composed heads refuse
    crosses: bool  # whether the module is cross-attention, whose cache holds keys of another sequence


@dataclass
class Call:
    """What a call of a module's `forward` notes: the inputs of both projections, and the layer of the cache."""

    cache_layer: Any = None
    query_input: Tensor | None = None  # [B, T, E]
    key_input: Tensor | None = None  # [B, S, key_size]; None where keys are read from a cache


class Running(threading.local):
    """The call that runs in a thread, which is not kept on the module, because several threads may call it at once."""

    def __init__(self) -> None:
        self.call: Call | None = None


RUNNING = Running()


def note_query_input(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """A hook before the projection of queries, whose input is `[B, T, E]`, or `[B, .., E]` of a picture's rows."""
    if RUNNING.call is not None:
        RUNNING.call.query_input = _as_rows(inputs[0])


def note_key_input(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """A hook before the projection of keys, whose input is `[B, S, key_size]`, or `[B, .., key_size]`."""
    if RUNNING.call is not None:
        RUNNING.call.key_input = _as_rows(inputs[0])


NOTES = (note_query_input, note_key_input)


def note_first(projection: nn.Module, note: Callable[..., None]) -> None:
    """Makes `note` the first hook of a projection, before those of others, which may change its input.

    Quantization that rotates the input has such a hook, which also makes itself the first. An adapter that took the
    place of a projection calls it with inputs that it has changed, as PEFT's OFT does, so a projection within another
    one notes nothing.
    """
    for hook in projection._forward_pre_hooks.values():
        if hook is note:
            return
        if hook not in NOTES:  # a joint projection has both notes, in any order
            break
    for module in projection.modules():
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is note]:
            del hooks[key]
    projection.register_forward_pre_hook(note, prepend=True)


class ComposedInterfaceAttention(SideGenerators):
    """Mixed in front of an attention module of Transformers, whose forward pass then composes heads.

    Attributes:
        choices: set when the module was changed.
        model_config: the configuration of the module before that, which tells how the model makes masks.
    """

    config: Any
    layer_idx: int | None
    choices: Choices
    model_config: Any

    def switch_on(self, choices: Choices) -> None:
        """Makes the module call `attend_with_composed_heads`, and note the inputs of its projections.

        The configuration becomes a copy, because other modules share the present one.
        """
        self.choices, self.model_config, self.config = choices, self.config, copy.copy(self.config)
        # The key "" is the model itself; a plain string would also change the implementation of its backbone.
        self.config._attn_implementation = {"": NAME}
        self._note_inputs()

    def __setattr__(self, name: str, value: Any) -> None:
        """Also notes the inputs of a projection that takes another's place, such as one with quantized weights."""
        super().__setattr__(name, value)
        if isinstance(value, nn.Module) and "choices" in vars(self):
            self._note_inputs()

    def _note_inputs(self) -> None:
        """Hooks the projections that are not hooked yet, or behind others."""
        for projection, note in zip(projections_of(self), NOTES, strict=True):
            if projection is not None:
                note_first(projection, note)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As that of the module.

        Raises:
            ValueError: the model makes masks for another kind of implementation, or the cache cannot keep factors.
        """
        check_makes_masks(self.model_config._attn_implementation)
        self._note_inputs()  # since others may have hooked or replaced a projection meanwhile
        cache = next((one for one in (*args, *kwargs.values()) if isinstance(one, Cache)), None)
        before, RUNNING.call = RUNNING.call, Call(self._layer_of(cache))
        try:
            return super().forward(*args, **kwargs)
        finally:
            RUNNING.call = before

    def stages(
        self, query: Tensor, keys: int, visible: int, *, has_sinks: bool = False
    ) -> tuple[Composition | None, Composition | None]:
        """Returns (pre, post) for queries `[B, H, T, D]` and the first `visible` of `keys` keys, cached ones included.

        Args:
            has_sinks: whether the key of attention sinks stands before the others.

        Raises:
            ValueError: the projections were not called on just these queries and keys, since the last call.
        """
        if self.composition is None:
            return None, None
        call, (batch, heads, length, _) = RUNNING.call or Call(), query.shape
        seen = () if call.query_input is None else call.query_input.shape[:-1]
        if seen != (batch, length):
            raise self._refusal("attends in pieces, or more than once", even_without_keys=True)
        factors = self._factors(call)
        if factors.heads not in (None, heads):
            what = f"attends with {heads} heads instead of {factors.heads}, which its attribute num_heads can tell"
            raise self._refusal(what, even_without_keys=True)
        call.query_input = call.key_input = None
        key_terms = factors.pre_key if factors.post_key is None else factors.post_key
        if self.composes_keys and (key_terms is None or key_terms.shape[1] != keys):
            raise self._refusal("attends to keys that it did not project, or whose factors are in no cache")
        factors = factors.up_to(visible)
        return self.composition.assemble(factors.behind_sink() if has_sinks else factors)

    def _refusal(self, what: str, *, even_without_keys: bool = False) -> ValueError:
        """The error for `what` the module does.

        Args:
            even_without_keys: whether the module cannot be composed by queries alone, either.
        """
        name, fix = type(self).__bases__[1].__name__, "" if even_without_keys else "use compose_key_wise=False, or "
        return ValueError(f"{name} {what}; {fix}leave it out by names=[...]")

    def _factors(self, call: Call) -> PackedFactors:
        """The factors of a call's queries, and of all keys; those of new keys are added to the cache."""
        assert self.composition is not None and call.query_input is not None
        if call.key_input is not None:
            factors = self.generate(call.query_input, _joined_rows(call.key_input, call.query_input.shape[0]))
            if call.cache_layer is None or (new := factors.keys) is None:
                return factors
            if not call.cache_layer.lacks_factors:
                raise self._refusal(f"keeps its keys in another layer of the cache than its own ({self.layer_idx})")
            return factors.with_keys(call.cache_layer.update_factors(new), self.composition.stages)
        factors = self.composition(call.query_input)
        if call.cache_layer is not None and self.choices.crosses:
            return factors.with_keys(call.cache_layer.factors.keys, self.composition.stages)
        return factors.with_keys_of(PackedFactors())

    @property
    def implementation(self) -> str | None:
        """The chosen one, else the model's own if that can compose heads; None takes the default."""
        named, own = self.choices.implementation, self.model_config._attn_implementation
        return own if named is None and own in COMPOSING_IMPLEMENTATIONS else named

    @property
    def has_complete_masks(self) -> bool:
        """Whether the model's masks hide all that is hidden; those for SDPA leave causality to the function."""
        return self.model_config._attn_implementation in (None, "eager")

    @property
    def composes_keys(self) -> bool:
        """Whether factors are generated from keys, too."""
        return any("key" in generator.sides for generator in self.generators())

    def _layer_of(self, cache: Cache | None) -> Any:
        """The cache's layer for this module, with a place for factors; None if there is no cache or nothing to keep."""
        if cache is None or not self.composes_keys:
            return None
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.cross_attention_cache if self.choices.crosses else cache.self_attention_cache
        if getattr(cache, "offloading", False):
            raise ValueError("an offloaded cache cannot keep composition factors here; use compose_key_wise=False")
        if self.layer_idx is None or self.layer_idx < 0:  # as in layers that stand at several places of a model
            raise self._refusal("has no layer of the cache for its own")
        return upgrade_layer(cache, self.layer_idx)


def attend_with_composed_heads(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    key_source: KeySource | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """A function of Transformers' attention interface, for modules that `compose_heads_of` has changed.

    As Transformers' function for SDPA does, it takes windows from the mask alone. With a `key_source` (as in
    `attention_function`, or in the thread, see `attending_to_pages`) no mask is read, and windows are what the module
    passes as `sliding_window`.

    Args:
        query, key, value: `[B, H, T, D]`, `[B, H_kv, S, D]` and `[B, H_kv, S, D_v]`.
        attention_mask: broadcastable to `[B, H, T, S]`; boolean (True: visible) or additive.
        position_bias: broadcastable to `[B, H, T, S]`, added to the composed scores.
        s_aux: attention sinks `[H]`.

    Returns:
        The output `[B, T, H, D_v]`, and the composed probabilities `[B, H, T, S]` or None.

    Raises:
        ValueError: the module is another, drops probabilities, packs documents without a mask, or has terms that
            composed heads do not have; or an engine keeps the keys, and attention is biased, not causal or has sinks.
    """
    if not isinstance(module, ComposedInterfaceAttention):
        raise ValueError(f"attn_implementation={NAME!r} is for modules that compose_heads_of(model) has changed")
    key_source = CURRENT.paged if key_source is None else key_source
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if key_source is not None:
        _refuse_beside_source(position_bias, s_aux, is_causal)
        attention_mask = None  # the source knows what each token sees
    _refuse_options(module, options, dropout, attention_mask)
    is_causal = is_causal and attention_mask is None and query.shape[2] > 1 and not module.has_complete_masks
    keys = key.shape[2]
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    if is_causal:
        key, value, attention_mask = _causal_keys(query.shape[2], key, value)
        is_causal = attention_mask is None
    pre, post = module.stages(query, keys, key.shape[2], has_sinks=s_aux is not None)
    mask = _joined_mask(attention_mask, position_bias, is_causal, key.shape[2])
    if s_aux is not None:
        query, key, value = with_sink_key(query, key, value, s_aux, scaling)
        mask = with_visible_sink(mask)
    calls: dict[str, Any] = {} if pre is None and post is None else {"pre": pre, "post": post}
    if key_source is not None:
        calls |= {"key_source": key_source, "sliding_window": options.get("sliding_window")}
    output, maps = _call_op(module, (query, key, value), mask, scaling=scaling, is_causal=is_causal, **calls)
    return output, maps if maps is None or s_aux is None else maps[..., 1:]


def _call_op(
    module: "ComposedInterfaceAttention", states: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention of queries, keys and values, which the ops need to be of one width, by the module's implementation.

    `scaling` and `is_causal` alone are options of plain attention, for which PyTorch's SDPA may be chosen.
    """
    needs_ours = not options.keys() <= {"scaling", "is_causal"}
    name = module.implementation or choose_implementation(None, states[0], mask, NO_TABLES, composed=needs_ours)
    width = max(state.shape[3] for state in states)
    padded = (_with_width(state, width) for state in states)
    output, maps = attention_function_of(name)(module, *padded, mask, **options)
    return output[..., : states[2].shape[3]], maps


def check_makes_masks(implementation: str | None) -> None:
    """Raises ValueError unless a model with this implementation makes the masks that composed heads take.

    These have an entry for every pair of query and key, or are None.
    """
    if implementation not in (None, "sdpa", "eager", *registered_implementations()):
        raise ValueError(
            f"attn_implementation={implementation!r} has no masks for composed heads; use 'sdpa' for the model"
        )


def _as_rows(states: Tensor) -> Tensor:
    """States `[B, .., E]` as `[B, T, E]`, the same object if they are so already."""
    return states.flatten(1, -2) if states.ndim > 3 else states


def _joined_rows(states: Tensor, batch: int) -> Tensor:
    """States `[B * n, S, E]` as `[B, n * S, E]`, as Mllama joins the tiles of a picture; the same object if n is 1.

    `torch.export` would make a constant of what `len` returns, and so the graph would take one batch size only.
    """
    rows = states.shape[0]
    return states if rows == batch or rows % batch else states.reshape(batch, -1, states.shape[-1])


def _refuse_options(
    module: ComposedInterfaceAttention, options: dict[str, Any], dropout: float, attention_mask: Tensor | None
) -> None:
    """Raises ValueError for what a call of an attention function asks for, and composed heads do not have."""
    if dropout and module.choices.drops:
        raise ValueError(dropout_error(dropout))
    if foreign := [term for term in FOREIGN_TERMS if options.get(term) is not None]:
        raise ValueError(f"attention with {foreign} cannot have composed heads; leave it out by names=[...]")
    if options.get("cache") is not None:  # a paged one, which models pass on before 5.24
        raise ValueError("continuous batching of composed heads in this model needs transformers>=5.24")
    borders = options.get("cu_seq_lens_q")
    if attention_mask is None and borders is not None and len(borders) != 2:  # two are those of a single document
        raise ValueError(
            "cu_seq_lens_q keeps no documents apart here; give position_ids alone and use_cache=False, with which "
            "Transformers makes a mask of them"
        )


def _refuse_beside_source(position_bias: Tensor | None, sinks: Tensor | None, is_causal: bool) -> None:
    """Raises ValueError for attention that a `KeySource` does not compute."""
    if position_bias is not None or sinks is not None or not is_causal:
        raise ValueError(
            "a paged cache and context parallelism serve causal attention without position bias and sinks alone; use "
            "generate(), or whole sequences"
        )


def _causal_keys(queries: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The keys and values that some queries see as in SDPA, and a mask if the ops would hide others without one.

    SDPA puts the first query at the first key, and the ops the last query at the last key.
    """
    keys = key.shape[2]
    if keys < queries:
        return key, value, torch.ones(queries, keys, dtype=torch.bool, device=key.device).tril()
    if keys > queries:  # the first tokens in a static cache, behind which it is empty
        key, value = key[:, :, :queries], value[:, :, :queries]
    return key, value, None


def _with_width(states: Tensor, width: int) -> Tensor:
    """States `[B, H, T, D]` with zeros as further channels up to `width`; `pad` would copy also those that have it."""
    return states if states.shape[3] == width else F.pad(states, (0, width - states.shape[3]))


def _joined_mask(mask: Tensor | None, bias: Tensor | None, is_causal: bool, keys: int) -> Tensor | None:
    """A mask and a bias, each broadcastable to `[B, H, T, S]`, as one mask with four dimensions.

    A bias may go on behind the `keys` that are attended to, into empty places of a static cache.
    """
    if bias is None:
        return None if mask is None else four_dimensional(mask)
    bias = bias[..., :keys]
    if is_causal:
        queries = bias.shape[-2]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=bias.device).tril(keys - queries)
    if mask is not None:
        bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
    return four_dimensional(bias)


AttentionInterface.register(NAME, attend_with_composed_heads)
