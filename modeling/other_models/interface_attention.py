"""Composed heads in attention modules of Transformers that call a function of its attention interface.

Nearly all of its models attend so. A module projects queries and keys by submodules of its own, updates the cache, and
passes queries, keys, values and the mask to the function that its configuration names. Composed heads need two things
more: what queries and keys are projected from (see `projection_inputs`), and a function that composes
(`interface_function`). The class here brings them together.
"""

import copy
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache

from ..caches.composed_cache import upgrade_layer
from ..layers.attention_interface import registered_implementations
from ..layers.head_composition import PackedFactors
from ..ops.dcmha.attention import COMPOSING_IMPLEMENTATIONS
from ..ops.dcmha.composition import Composition
from .interface_modules import projections_of
from .projection_inputs import NOTES, RUNNING, Call, joined_rows, note_first
from .side_generators import SideGenerators


class Choices(NamedTuple):
    """What was chosen for an attention module that gets composed heads."""

    implementation: str | None  # of `dynattn.dcmha_attention`; None takes the default
    drops: bool  # whether the module's own dropout of probabilities stays, which composed heads refuse
    crosses: bool  # whether the module is cross-attention, whose cache holds keys of another sequence


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

    def switch_on(self, choices: Choices, function: str) -> None:
        """Makes the module call a function of the attention interface, and note the inputs of its projections.

        The configuration becomes a copy, because other modules share the present one.
        """
        self.choices, self.model_config, self.config = choices, self.config, copy.copy(self.config)
        # The key "" is the model itself; a plain string would also change the implementation of its backbone.
        self.config._attn_implementation = {"": function}
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

        It takes what the running call noted, and adds the factors of new keys to the cache.

        Args:
            has_sinks: whether the key of attention sinks stands before the others.

        Raises:
            ValueError: the projections were not called on just these queries and keys, since the last call.
        """
        if self.composition is None:
            return None, None
        call = RUNNING.call or Call()
        query_input, key_input = call.take_inputs()
        batch, heads, length, _ = query.shape
        if query_input is None or query_input.shape[:-1] != (batch, length):
            raise self._refusal("attends in pieces, or more than once", even_without_keys=True)
        factors = self._factors(query_input, key_input, call.cache_layer)
        self._check_counts(factors, heads, keys)
        factors = factors.up_to(visible)
        return self.composition.assemble(factors.behind_sink() if has_sinks else factors)

    def _check_counts(self, factors: PackedFactors, heads: int, keys: int) -> None:
        """Raises ValueError unless the factors are those of so many heads, and of so many keys if these have any."""
        if factors.heads not in (None, heads):
            what = f"attends with {heads} heads instead of {factors.heads}, which its attribute num_heads can tell"
            raise self._refusal(what, even_without_keys=True)
        key_terms = factors.pre_key if factors.post_key is None else factors.post_key
        if self.composes_keys and (key_terms is None or key_terms.shape[1] != keys):
            raise self._refusal("attends to keys that it did not project, or whose factors are in no cache")

    def _refusal(self, what: str, *, even_without_keys: bool = False) -> ValueError:
        """The error for `what` the module does.

        Args:
            even_without_keys: whether the module cannot be composed by queries alone, either.
        """
        name, fix = type(self).__bases__[1].__name__, "" if even_without_keys else "use compose_key_wise=False, or "
        return ValueError(f"{name} {what}; {fix}leave it out by names=[...]")

    def _factors(self, query_input: Tensor, key_input: Tensor | None, cache_layer: Any) -> PackedFactors:
        """The factors of a call's queries, and of all keys; those of new keys are added to the cache."""
        assert self.composition is not None
        if key_input is None:
            return self._factors_of_known_keys(query_input, cache_layer)
        factors = self.generate(query_input, joined_rows(key_input, query_input.shape[0]))
        if cache_layer is None or (new := factors.keys) is None:
            return factors
        if not cache_layer.lacks_factors:
            raise self._refusal(f"keeps its keys in another layer of the cache than its own ({self.layer_idx})")
        return factors.with_keys(cache_layer.update_factors(new), self.composition.stages)

    def _factors_of_known_keys(self, query_input: Tensor, cache_layer: Any) -> PackedFactors:
        """The factors of a call that projects no keys.

        Cross-attention has the factors of keys in its cache after the first call. A module that attends to the keys of
        another one, as some do in Gemma 3n, has none.
        """
        assert self.composition is not None
        factors = self.composition(query_input)
        if cache_layer is not None and self.choices.crosses:
            return factors.with_keys(cache_layer.factors.keys, self.composition.stages)
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


def check_makes_masks(implementation: str | None) -> None:
    """Raises ValueError unless a model with this implementation makes the masks that composed heads take.

    These have an entry for every pair of query and key, or are None.
    """
    if implementation not in (None, "sdpa", "eager", *registered_implementations()):
        raise ValueError(
            f"attn_implementation={implementation!r} has no masks for composed heads; use 'sdpa' for the model"
        )
