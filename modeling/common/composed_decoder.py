"""The decoder of the families with composed attention: positions of every scheme, and caches that keep factors."""

from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..caches.composed_cache import upgrade_to_composed_cache
from ..caches.key_places import first_query_offset, key_count
from ..layers.attention_interface import registered_implementations
from ..ops.distance_tables import DistanceTables
from ..positions.absolute import make_absolute
from ..positions.alibi import alibi_bias
from ..positions.carope import make_room_for_phases
from ..positions.learned_tables import DistanceTable, learned_bias, learned_gain
from ..positions.rotary import rotaries_by_layer_type, rotary_of
from .composed_model import ComposedPreTrainedModel
from .decoder import DecoderBody
from .decoder_inputs import DecoderArguments, DecoderInputs, new_token_mask
from .input_checks import check_longrope_border, is_complete_mask


class ComposedDecoderPreTrainedModel(ComposedPreTrainedModel):
    """Answers what serving engines ask of a decoder."""

    @property
    def supports_paged_cache(self) -> bool:
        """Whether a paged cache, which keeps a row of keys and one of values for a token, is all that layers need.

        Rows have additional channels for composition factors, but none for the phases of CARoPE.
        """
        return "carope" not in self.config.schemes

    @property
    def attends_to_paged_cache(self) -> bool:
        """Whether this package attends to a paged cache, or leaves that to Transformers.

        This package does so if no other implementation can, or if the model runs with one of this package's
        implementations. `eager` does not count as one of them, because Transformers has an `eager`, too.
        """
        return self.config.needs_own_ops or self.config._attn_implementation in registered_implementations()


class ComposedDecoderBody(DecoderBody):
    """A `DecoderBody` that passes positions of every scheme to its layers and keeps composition factors in caches."""

    rotary_emb: nn.Module | None
    position_bias: DistanceTable | None
    position_gain: DistanceTable | None

    def make_positions(self) -> None:
        """Makes the modules of the position schemes, one of each for all layers."""
        self.rotary_emb = rotaries_by_layer_type(self.config)
        self.embed_positions = make_absolute(self.config)
        self.position_bias, self.position_gain = learned_bias(self.config), learned_gain(self.config)

    def prepare_cache(self, cache: Cache) -> None:
        """Makes `cache`, in place, also keep key-side composition factors and phases of CARoPE, if there are any."""
        layers: Any = self.layers
        if any(layer.self_attn.composes_keys for layer in layers):
            upgrade_to_composed_cache(cache)
        if "carope" in self.config.schemes:
            make_room_for_phases(cache, self.config)

    def make_masks(
        self, given: DecoderArguments, inputs_embeds: Tensor, starts: Tensor | None
    ) -> dict[str, Tensor | None]:
        """As the base, but without `starts` where only this package's ops can attend: they get them as `first_keys`.

        A mask that keeps documents apart would have an element for each pair of tokens.
        """
        return super().make_masks(given, inputs_embeds, None if self.config.needs_own_ops else starts)

    def layer_inputs(self, given: DecoderArguments, inputs: DecoderInputs) -> tuple[Tensor, dict[str, dict[str, Any]]]:
        """The embeddings `[B, T, E]`, with absolute positions added, and keyword arguments for the layers of each type.

        The arguments are positions, the starts of packed documents, rotary cosines and sines, tables by distance, and
        for CARoPE which tokens are padding.

        Raises:
            ValueError: there are learned positions, and tokens beyond them; or cached keys have factors of LongRoPE
                that the new tokens outgrow.
        """
        config = self.config
        check_longrope_border(config, inputs.position_ids, inputs.past_key_values)
        hidden_states = self.embed(inputs)
        shared: dict[str, Any] = {
            "position_ids": inputs.position_ids,
            "first_keys": None if is_complete_mask(given.attention_mask) else inputs.document_starts,
        }
        if "carope" in config.schemes:
            length = hidden_states.shape[1]
            shared["token_mask"] = new_token_mask(given.attention_mask, inputs.past_key_values, length)
        arguments = {
            layer_type: {**shared, "position_embeddings": self._rotations(layer_type, inputs)}
            for layer_type in set(config.layer_types)
        }
        if config.has_distance_tables:
            # Only then, because tools that run a layer by itself, as AutoRound does, know no other tuple among its
            # arguments than `position_embeddings`.
            for layer_type, tables in self._distance_tables(given, inputs).items():
                arguments[layer_type]["tables"] = tables
        return hidden_states, arguments

    def _rotations(self, layer_type: str, inputs: DecoderInputs) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines `[B, T, rotary_dim]` for the layers of a type; None if positions do not rotate them."""
        embedding = rotary_of(self.rotary_emb, self.config, layer_type)
        return None if embedding is None else embedding(inputs.inputs_embeds, inputs.position_ids)

    def _distance_tables(self, given: DecoderArguments, inputs: DecoderInputs) -> dict[str, DistanceTables]:
        """The tables of each layer type: a row for each distance from 0, and the place of the first new token."""
        config, cache, embeddings = self.config, inputs.past_key_values, inputs.inputs_embeds
        length = embeddings.shape[1]
        first_of_type = {layer_type: config.layer_types.index(layer_type) for layer_type in set(config.layer_types)}
        source = given.key_source
        count_keys = partial(key_count, cache, length=length) if source is None else source.key_count
        keys = max(map(count_keys, first_of_type.values()))
        gain = None if self.position_gain is None else self.position_gain(keys)
        biases: dict[str, Tensor] = {}
        if "alibi" in config.schemes:
            biases["alibi"] = alibi_bias(keys, config.num_attention_heads, embeddings.device)
        if self.position_bias is not None:
            biases["t5"] = self.position_bias(keys)
        tables = {}
        for layer_type, layer in first_of_type.items():
            bias = biases.get(config.scheme_of(layer_type))
            compose_bias = config.compose_position_bias and bias is not None
            tables[layer_type] = DistanceTables(bias, gain, first_query_offset(cache, layer, length), compose_bias)
        return tables
