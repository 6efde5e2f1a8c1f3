"""Dynamically composable multi-head attention (DCMHA, arXiv 2405.08553) as a layer."""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, EncoderDecoderCache

from ..caches.names import layers_write_paged_cache
from ..caches.offloading import await_copies, read_layer, update_layer
from ..ops.autocast import autocast
from ..ops.dcmha.composition import Composition
from ..ops.dtypes import at_least_float32
from ..positions.carope import ContentRotary, last_phases, pack_phases
from ..positions.rotary import rotate, rotates_layer
from .attention_interface import attention_function_of, check_composing, own_attention_function
from .differential_heads import DifferentialHeads
from .head_composition import PackedFactors, make_generators
from .qk_norm import make_head_norm


class ComposedAttention(nn.Module):
    """Multi-head attention whose heads are composed: projections, composition factors, cache and the attention op.

    Without composition in the configuration it is plain multi-head or grouped-query attention.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        layer_idx: int,
        *,
        is_causal: bool = True,
        is_cross_attention: bool = False,
        composes: bool | None = None,
    ) -> None:
        """Makes the projections, norms and generators of factors.

        Args:
            is_causal: whether a token sees no later ones; ignored in cross-attention, where it sees all keys.
            is_cross_attention: whether keys, values and the factors of the key side come from other hidden states.
            composes: whether heads are composed, by default as configured.
        """
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim: int = config.head_dim
        self.scaling = self.head_dim**-0.5 if config.attention_scaling is None else config.attention_scaling
        self.attention_dropout = config.attention_dropout
        self.slides = not is_cross_attention and is_sliding(config, layer_idx)
        self.is_causal = is_causal and not is_cross_attention  # Transformers' attention functions read it as well
        hidden, bias = config.hidden_size, config.attention_bias
        query_size, key_size = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.num_key_value_groups = query_size // key_size
        self.q_proj = nn.Linear(hidden, query_size, bias=bias)
        self.k_proj = nn.Linear(hidden, key_size, bias=bias)
        self.v_proj = nn.Linear(hidden, key_size, bias=bias)
        self.o_proj = nn.Linear(query_size, hidden, bias=config.has_output_bias)
        self.q_norm = make_head_norm(config, config.num_attention_heads) if config.use_qk_norm else None
        self.k_norm = make_head_norm(config, config.num_key_value_heads) if config.use_qk_norm else None
        self.rotates = rotates_layer(config, layer_idx)
        self.composition = self.key_composition = None
        if config.composes if composes is None else composes:
            self.composition, self.key_composition = make_generators(config, cross_attention=is_cross_attention)
        self.content_rotary = make_content_rotary(config, layer_idx)
        subtracts = config.differential_heads and self.composition is not None
        self.differential = DifferentialHeads(config, layer_idx) if subtracts else None
        self.map_hooks: Any = None  # the place for the module of `add_map_hooks`

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        key_value_states: Tensor | None = None,
        implementation: str | None = None,
        token_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output `[B, T, E]` and, from `eager`, the composed probabilities `[B, H, T, S]`.

        Composed probabilities can be negative, and those of a query need not sum to one.

        Args:
            hidden_states: `[B, T, E]`, what the layer gives to it, normalized or not.
            position_embeddings: cosines and sines, each `[B, T, rotary_dim]`; without them, and in a layer that
                `no_rope_layers` leaves out, nothing is rotated.
            attention_mask: as the mask function of the implementation makes it.
            past_key_values: a `Cache`; or an `EncoderDecoderCache`, of which the layer uses the self-attention or the
                cross-attention cache.
            key_value_states: in cross-attention, the hidden states `[B, S, E]` that keys and values are projected from.
            implementation: name of the attention implementation, by default the configuration's; ignored in a layer
                with map hooks, which attends by itself.
            token_mask: `[B, T]`, False for padding, which CARoPE does not count as a step.
            kwargs: further arguments of the attention function, such as `first_keys` and `tables`.

        Raises:
            ValueError: `output_attentions` is among `kwargs`, and the implementation returned no maps.
        """
        factors = self.composition(hidden_states) if self.composition is not None else PackedFactors()
        if key_value_states is not None:
            query = self._heads(self.q_proj, hidden_states, self.q_norm)
            key, value, factors = self._read_source(key_value_states, past_key_values, factors)
        else:
            query, key, value = self.project(hidden_states, position_embeddings)
            cache = getattr(past_key_values, "self_attention_cache", past_key_values)
            query, key, phases = self.rotate_by_content(query, key, hidden_states, cache, token_mask)
            key, value, factors = self._update_cache(key, value, factors, cache, phases)
            key = key[..., : self.head_dim]
            if layers_write_paged_cache(kwargs):
                key, value = kwargs.pop("cache").update(key, value, self.layer_idx, kwargs=kwargs)
        output, weights = self._attend(query, key, value, attention_mask, factors, implementation, **kwargs)
        if self.differential is not None:
            output = self.differential.normalize(output)
        return self.o_proj(output.flatten(2)), weights

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        factors: PackedFactors,
        implementation: str | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The attention function's output `[B, T, H, D]` and maps; see `forward` for its arguments and errors."""
        name = implementation or self.config._attn_implementation
        find = attention_function_of if kwargs.get("key_source") is None else own_attention_function
        attend = find(name) if self.map_hooks is None else self.map_hooks.attend
        stages: dict[str, Composition | None] = {}
        if self.composition is not None:
            check_composing(name)
            stages["pre"], stages["post"] = self.composition.assemble(factors)
        if self.differential is not None:
            stages["post"] = self.differential(stages["post"])
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            dropout=self.attention_dropout if self.training else 0.0,
            **stages,
            **kwargs,
        )
        if weights is None and kwargs.get("output_attentions") and kwargs.get("key_source") is None:
            raise ValueError(
                f"attn_implementation={name!r} returned no attention maps; leave output_attentions out, or use "
                "attn_implementation='eager'"
            )
        return output, weights

    @property
    def sliding_window(self) -> int | None:
        """The window as the ops count it, the token itself included; None where the layer sees everything.

        It is read anew, because masks and caches follow a changed configuration, and `typed_layers` keeps `slides` up
        to date. Transformers' attention functions read it as well; for bidirectional models it counts `sliding_window`
        tokens on either side, without itself.
        """
        if not self.slides:
            return None
        return self.config.sliding_window if self.is_causal else self.config.sliding_window + 1

    @property
    def composes_keys(self) -> bool:
        """Whether factors are generated from keys, too, so that caches keep them."""
        return "key" in getattr(self.key_composition or self.composition, "sides", ())

    def project(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[B, H, T, D]`, keys and values `[B, H_kv, T, D]` of a layer's own `hidden_states` `[B, T, E]`."""
        if not self.rotates:
            position_embeddings = None
        query = self._heads(self.q_proj, hidden_states, self.q_norm, position_embeddings)
        key = self._heads(self.k_proj, hidden_states, self.k_norm, position_embeddings)
        return query, key, self._heads(self.v_proj, hidden_states)

    def rotate_by_content(
        self,
        query: Tensor,
        key: Tensor,
        hidden_states: Tensor,
        cache: Cache | None,
        token_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rotates queries `[B, H, T, D]` and keys `[B, H_kv, T, D]` by content, if the position scheme is CARoPE.

        Returns:
            Queries, keys, and the phases `[B, H_kv, T, D / 2]`, which depend on `hidden_states` `[B, T, E]` and
            `token_mask` `[B, T]` and go on from the last ones in the cache. With other schemes both stay as they are,
            and phases are None.
        """
        if self.content_rotary is None:
            return query, key, None
        await_copies(cache, hidden_states.device)
        past = last_phases(cache, self.layer_idx, self.head_dim, at_least_float32(key.dtype))
        phases = self.content_rotary(hidden_states, past, token_mask)
        query = rotate(query, *self.content_rotary.angles(phases, self.num_key_value_groups))
        return query, rotate(key, *self.content_rotary.angles(phases)), phases

    def _heads(
        self,
        projection: nn.Module,
        states: Tensor,
        norm: nn.Module | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Projects `states` `[B, T, E]` to heads `[B, H, T, D]`, normalizes and then rotates them where given."""
        heads = projection(states).unflatten(-1, (-1, self.head_dim))
        heads = (heads if norm is None else norm(heads)).transpose(1, 2)
        return heads if position_embeddings is None else rotate(heads, *position_embeddings)

    def _read_source(
        self, source: Tensor, past_key_values: EncoderDecoderCache | None, factors: PackedFactors
    ) -> tuple[Tensor, Tensor, PackedFactors]:
        """Keys and values `[B, H_kv, S, D]` of `source` `[B, S, E]`, and `factors` with those of the key side added.

        They are computed in the first step of a generation and then read from the cache. A static cache may be longer
        than the source, so all are cut to its length.
        """
        if past_key_values is None:
            return self._project_source(source, factors)
        cache, length = past_key_values.cross_attention_cache, source.shape[1]
        if past_key_values.is_updated.get(self.layer_idx):
            key, value = read_layer(cache, self.layer_idx, source.device)
            if self.key_composition is not None:
                layer: Any = cache.layers[self.layer_idx]
                factors = self._with_keys(factors, layer.factors.keys.to(source.device))
        else:
            key, value, factors = self._update_cache(*self._project_source(source, factors), cache)
            past_key_values.is_updated[self.layer_idx] = True
        return key[:, :, :length], value[:, :, :length], factors.up_to(length)

    def _project_source(self, source: Tensor, factors: PackedFactors) -> tuple[Tensor, Tensor, PackedFactors]:
        """What `_read_source` returns without a cache."""
        if self.key_composition is not None:
            factors = factors.with_keys_of(self.key_composition(source))
        return self._heads(self.k_proj, source, self.k_norm), self._heads(self.v_proj, source), factors

    def _update_cache(
        self, key: Tensor, value: Tensor, factors: PackedFactors, cache: Cache | None, phases: Tensor | None = None
    ) -> tuple[Tensor, Tensor, PackedFactors]:
        """Appends keys and values `[B, H_kv, T, D]` and key factors to the cache; returns those of all tokens in it.

        The cache has no place for `phases` `[B, H_kv, T, D / 2]`, so they become further channels of the keys, also of
        the returned ones.
        """
        if cache is None:
            return key, value, factors
        (key,) = autocast(key)  # norms and rotations make it float32, but a cache keeps keys in the dtype of values
        if phases is not None:
            key = pack_phases(key, phases)
        if (key_factors := factors.keys) is None:
            return *update_layer(cache, key, value, self.layer_idx), factors
        key, (value, key_factors) = update_layer(cache, key, value, self.layer_idx, key_factors)
        return key, value, self._with_keys(factors, key_factors)

    def _with_keys(self, factors: PackedFactors, keys: Tensor) -> PackedFactors:
        """`factors` with those of the key side from a cache, `[B, P * terms, S, H]`.

        Their stages are those that the generator packs, whatever has become of the configuration since it was made.
        """
        assert self.composition is not None
        return factors.with_keys(keys, self.composition.stages)


def is_sliding(config: PreTrainedConfig, layer_idx: int) -> bool:
    """Whether a layer sees a window only."""
    return getattr(config, "layer_types", None) is not None and config.layer_types[layer_idx] == "sliding_attention"


def make_content_rotary(config: PreTrainedConfig, layer_idx: int) -> ContentRotary | None:
    """The rotary embedding of a layer whose position scheme is `carope`; None for all other schemes."""
    scheme_of = getattr(config, "scheme_of", None)
    if scheme_of is None or scheme_of(config.layer_types[layer_idx]) != "carope":
        return None
    theta = config.rope_of(config.layer_types[layer_idx])["rope_theta"]
    return ContentRotary(config.hidden_size, config.num_key_value_heads, config.head_dim, theta)
