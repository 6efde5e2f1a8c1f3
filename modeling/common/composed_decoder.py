"""The decoder of the families with composed attention: positions of every scheme, and caches that keep factors."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..caches.composed_cache import upgrade_to_composed_cache
from ..caches.key_places import first_query_offset, key_count
from ..layers.attention_interface import registered_implementations
from ..layers.composed_attention import ComposedAttention
from ..layers.context_parallel import ContextParallel
from ..ops.distance_tables import DistanceTables
from ..positions.absolute import make_absolute
from ..positions.alibi import alibi_bias
from ..positions.carope import make_room_for_phases
from ..positions.learned_tables import DistanceTable, learned_bias, learned_gain
from ..positions.rotary import rotaries_by_layer_type, rotary_of
from .composed_model import ComposedPreTrainedModel
from .decoder import DecoderBody
from .decoder_heads import CausalLMHead
from .decoder_inputs import DecoderArguments, DecoderInputs, new_token_mask
from .input_checks import check_tokens, is_complete_mask
from .packed_documents import packed_starts


class ComposedDecoderPreTrainedModel(ComposedPreTrainedModel):
    """Divides sequences among processes, and answers what serving engines ask of a decoder."""

    def set_context_parallel(self, context: ContextParallel | None) -> None:
        """From now on the processes of `context` share the tokens of each sequence; None ends that.

        Each process then gives the model its part of all that belongs to tokens, which `context.take` cuts out of whole
        sequences: `input_ids`, `position_ids`, `labels`, and `shift_labels`, the labels that were shifted before. It
        gets hidden states, logits and loss of this part. There is no cache.

        Raises:
            ValueError: the model has a head that reads whole sequences, or the position scheme is CARoPE, whose phases
                are sums over all earlier tokens.
        """
        if context is not None and not isinstance(self, CausalLMHead | ComposedDecoderBody):
            raise ValueError(f"{type(self).__name__} reads whole sequences; context parallelism is for causal LM alone")
        if context is not None and "carope" in self.config.schemes:
            raise ValueError("position_scheme='carope' reads all earlier tokens; context parallelism needs another one")
        for module in self.modules():
            if isinstance(module, ComposedAttention | ComposedDecoderBody):
                module.context_parallel = context

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

    def prepare_inputs(self, given: DecoderArguments) -> DecoderInputs:
        """As the base; with context parallelism for a part of the tokens of whole sequences."""
        if (context := self.context_parallel) is None:
            return super().prepare_inputs(given)
        check_tokens(given.input_ids, given.inputs_embeds)
        refuse_other_tokens(given)
        if given.position_ids is None:
            tokens: Any = given.input_ids if given.inputs_embeds is None else given.inputs_embeds
            places = torch.arange(tokens.shape[1] * context.processes, device=tokens.device)
            given = given._replace(position_ids=context.take(places[None]))
        return super().prepare_inputs(given._replace(use_cache=False))

    def document_starts(self, given: DecoderArguments, inputs_embeds: Tensor) -> Tensor | None:
        """As the base; with context parallelism `[B, T]` for a part of the tokens, as indices in whole sequences."""
        if (context := self.context_parallel) is None:
            return super().document_starts(given, inputs_embeds)
        assert given.position_ids is not None  # `prepare_inputs` fills them in
        positions = context.gather(given.position_ids)
        starts = packed_starts(positions, torch.Size((len(inputs_embeds), positions.shape[1])))
        return None if starts is None else context.take(starts)

    def prepare_cache(self, cache: Cache) -> None:
        """Makes `cache`, in place, also keep key-side composition factors and phases of CARoPE, if there are any."""
        if self.config.composes_keys:
            upgrade_to_composed_cache(cache)
        if "carope" in self.config.schemes:
            make_room_for_phases(cache, self.config)

    def make_masks(
        self, given: DecoderArguments, inputs_embeds: Tensor, starts: Tensor | None
    ) -> dict[str, Tensor | None]:
        """As the base, but without `starts` where only this package's ops can attend: they get them as `first_keys`.

        A mask that keeps documents apart would have an element for each pair of tokens. With context parallelism there
        are no masks at all.
        """
        if self.context_parallel is not None:
            return dict.fromkeys(self.config.layer_types)
        return super().make_masks(given, inputs_embeds, None if self.config.needs_own_ops else starts)

    def layer_inputs(self, given: DecoderArguments, inputs: DecoderInputs) -> tuple[Tensor, dict[str, dict[str, Any]]]:
        """The embeddings `[B, T, E]`, with absolute positions added, and keyword arguments for the layers of each type.

        The arguments are positions, the starts of packed documents, rotary cosines and sines, tables by distance, and
        for CARoPE which tokens are padding.
        """
        config = self.config
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
        if self.context_parallel is not None:
            length *= self.context_parallel.processes
        first_of_type = {layer_type: config.layer_types.index(layer_type) for layer_type in set(config.layer_types)}
        count_keys = partial(key_count, cache, length=length) if given.paged is None else given.paged.key_count
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


def refuse_other_tokens(given: DecoderArguments) -> None:
    """Raises ValueError if arguments of a call with context parallelism are of other tokens than this process's part.

    These are masks, caches and borders of documents, which belong to whole sequences.
    """
    names = ("attention_mask", "past_key_values", "cu_seq_lens", "paged")
    if present := [name for name in names if getattr(given, name) is not None]:
        raise ValueError(
            f"{present} cannot be given while processes share each sequence: mark packed documents by position_ids, "
            "pad behind the text, and call set_context_parallel(None) before you generate"
        )
