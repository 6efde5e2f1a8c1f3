"""Reads what the attention layers of a model compute: maps before and after composing, and the compositions."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from dynattn.modeling.layers.attention_interface import attention_function
from dynattn.modeling.layers.attention_masks import compact_mask
from dynattn.modeling.ops.dcmha.composition import Composition
from dynattn.modeling.ops.dcmha.eager import AttentionMaps, dcmha_eager
from dynattn.modeling.ops.distance_tables import NO_TABLES, DistanceTables, at_distances
from dynattn.modeling.ops.masking import both, key_distances, split_mask, visible_keys, with_first_keys
from dynattn.modeling.other_models.interface_attention import ComposedInterfaceAttention

IMPLEMENTATION = "observed"
STAGES = ("pre", "post")

# Takes the number of a layer and its compositions by stage, and returns those to compute with.
Change = Callable[[int, dict[str, Composition]], dict[str, Composition]]


@dataclass(frozen=True)
class LayerObservation:
    """What one layer computed. Maps are `[1, H, T, T]`, in float32."""

    stages: dict[str, Composition]  # those that the layer has, of STAGES
    maps: AttentionMaps
    visible: Tensor  # [T, T], boolean: the pairs of a query and a key that it sees; the same for all heads
    tables: DistanceTables = NO_TABLES

    def around(self, stage: str) -> tuple[Tensor, Tensor]:
        """The maps `[1, H, T, T]` that a stage mixes, and those that it makes.

        The maps of the op lack two things that a stage mixes, which are added here: before the softmax a bias by
        distance (if it is composed), and after it the gain by distance.
        """
        names = ("scores", "composed_scores") if stage == "pre" else ("probs", "composed_probs")
        before, after = (getattr(self.maps, name) for name in names)
        queries, keys = before.shape[2:]
        distance = key_distances(queries, keys, self.tables.offset, before.device)
        if stage == "pre" and self.tables.bias is not None and self.tables.compose_bias:
            before = before + at_distances(self.tables.bias, distance)
        if stage == "post" and self.tables.gain is not None:
            before = before * at_distances(self.tables.gain, distance)
        return before, after


def count_layers(model: PreTrainedModel) -> int:
    """The most layers that `attention_through` can observe; 0 if the model composes no heads.

    Of heads composed in place some may never attend, such as those of cross-attention in a decoder without encoder.
    """
    in_place = sum(isinstance(module, ComposedInterfaceAttention) for module in model.modules())
    return model.config.num_hidden_layers if getattr(model.config, "composes", False) else in_place


@contextmanager
def attention_through(
    model: PreTrainedModel,
    *,
    change: Change = lambda layer, stages: stages,
    keep: Callable[[int, LayerObservation], None] = lambda layer, observed: None,
) -> Iterator[None]:
    """In the block, the layers of `model` attend by the reference implementation.

    Layers whose heads were composed in place are numbered in the order in which they attend, without the others.

    Args:
        change: returns the compositions that a layer computes with, in place of its own.
        keep: called with the number of each layer and what it computed.
    """
    in_place = [module for module in model.modules() if isinstance(module, ComposedInterfaceAttention)]
    numbers: dict[Any, int] = {}

    def attend(module: Any, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """The attention function, with the interface of Transformers (see `attention_function`)."""
        layer = numbers.setdefault(module, len(numbers)) if in_place else module.layer_idx
        given = {stage: options.pop(stage, None) or Composition() for stage in STAGES}
        # A stage can be without terms; then it mixes nothing and is not one of the layer's.
        stages = change(layer, {stage: one for stage, one in given.items() if one.tensors()})

        def observed(
            query: Tensor, key: Tensor, value: Tensor, *, tables: DistanceTables = NO_TABLES, **call: Any
        ) -> tuple[Tensor, None]:
            """`dcmha_eager`, whose maps are kept: output `[1, T, H, D]`."""
            maps: dict[str, Tensor] = {}
            output, _ = dcmha_eager(query, key, value, tables=tables, hook=maps.setdefault, **call)
            kept = AttentionMaps(**{name: part.float() for name, part in maps.items()})
            keep(layer, LayerObservation(stages, kept, visible_pairs(query, key, tables, call), tables))
            return output, None

        return attention_function(observed)(module, *args, **options, **stages)

    AttentionInterface.register(IMPLEMENTATION, attend)
    AttentionMaskInterface.register(IMPLEMENTATION, compact_mask)
    config, before, choices = model.config, model.config._attn_implementation, [module.choices for module in in_place]
    if not in_place:
        config._attn_implementation = IMPLEMENTATION
    for module in in_place:
        module.choices = module.choices._replace(implementation=IMPLEMENTATION)
    try:
        yield
    finally:
        config._attn_implementation = before
        for module, chosen in zip(in_place, choices, strict=True):
            module.choices = chosen


def visible_pairs(query: Tensor, key: Tensor, tables: DistanceTables, call: Mapping[str, Any]) -> Tensor:
    """The pairs `[T, S]`, boolean, that the masks of a call of `dcmha_eager` with one text leave visible.

    Probabilities do not tell: those of a pair that a head sees may be too small for their dtype, and thus 0.

    Args:
        query: `[1, H, T, D]`.
        key: `[1, H_kv, S, D]`.
        call: the keywords of the call.
    """
    queries, keys, device = query.shape[2], key.shape[2], query.device
    structure = {name: call[name] for name in ("is_causal", "sliding_window")}
    structural = visible_keys(queries, keys, **structure, device=device, offset=tables.offset)
    given, _ = split_mask(with_first_keys(call["attention_mask"], call["first_keys"], keys, device))
    # A mask `[1, 1, T, S]` is the same for all heads, and has a dimension 1 for queries if it only hides padding.
    visible = both(structural, None if given is None else given[0, 0])
    everything = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return everything if visible is None else everything & visible
