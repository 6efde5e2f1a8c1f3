"""Runs a model and keeps what its attention layers compute: maps before and after composing, and the compositions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from dynattn.modeling.layers.attention_interface import attention_function, chunked_mask
from dynattn.modeling.ops.dcmha.composition import Composition
from dynattn.modeling.ops.dcmha.eager import AttentionMaps, dcmha_eager
from dynattn.modeling.ops.distance_tables import NO_TABLES, DistanceTables

from ..common.composition_measures import maps_around

IMPLEMENTATION = "observed"
STAGES = ("pre", "post")

# Takes the number of a layer and its compositions by stage, and returns those to compute with.
Change = Callable[[int, dict[str, Composition]], dict[str, Composition]]


@dataclass(frozen=True)
class LayerObservation:
    """What one layer computed. Maps are `[1, H, T, T]`, in float32."""

    stages: dict[str, Composition]  # those that the layer has, of STAGES
    maps: AttentionMaps
    tables: DistanceTables = NO_TABLES

    @property
    def visible(self) -> Tensor:
        """`[1, H, T, T]`, boolean: the pairs of a query and a key that it sees."""
        assert self.maps.probs is not None
        return self.maps.probs != 0

    def around(self, stage: str) -> tuple[Tensor, Tensor]:
        """The maps `[1, H, T, T]` before and after a stage."""
        return maps_around(stage, self.maps, self.tables)


@torch.no_grad()
def observe(model: PreTrainedModel, tokens: Tensor) -> tuple[list[LayerObservation], float]:
    """Returns what each layer computes for `tokens` `[1, T]`, and the mean loss of the tokens after the first."""
    layers: dict[int, LayerObservation] = {}

    def keep(layer: int, observed: LayerObservation) -> None:
        layers[layer] = observed

    with attention_through(model, keep=keep):
        loss = loss_of(model, tokens)
    return [layers[index] for index in sorted(layers)], loss


@torch.no_grad()
def loss_with(model: PreTrainedModel, tokens: Tensor, change: Change) -> float:
    """The mean loss for `tokens` `[1, T]` if all layers compute with changed compositions."""
    with attention_through(model, change=change):
        return loss_of(model, tokens)


def loss_of(model: PreTrainedModel, tokens: Tensor) -> float:
    """The mean loss in nats of the tokens `[1, T]` after the first, each predicted from those before it."""
    logits = model(tokens, use_cache=False).logits  # [1, T, V]
    return float(cross_entropy(logits[0, :-1].float(), tokens[0, 1:]))


@contextmanager
def attention_through(
    model: PreTrainedModel,
    *,
    change: Change = lambda layer, stages: stages,
    keep: Callable[[int, LayerObservation], None] = lambda layer, observed: None,
) -> Iterator[None]:
    """In the block, the layers of `model` attend by the reference implementation.

    Args:
        change: returns the compositions that a layer computes with, in place of its own.
        keep: called with the number of each layer and what it computed.
    """

    def attend(module: Any, *args: Any, **options: Any) -> tuple[Tensor, None]:
        """The attention function, with the interface of Transformers (see `attention_function`)."""
        given = {stage: options.pop(stage, None) for stage in STAGES}
        stages = change(module.layer_idx, {stage: one for stage, one in given.items() if one is not None})
        maps: dict[str, Tensor] = {}
        observed = attention_function(partial(dcmha_eager, hook=maps.setdefault))
        output, _ = observed(module, *args, **options, **stages)
        kept = AttentionMaps(**{name: part.float() for name, part in maps.items()})
        keep(module.layer_idx, LayerObservation(stages, kept, options.get("tables", NO_TABLES)))
        return output, None

    AttentionInterface.register(IMPLEMENTATION, attend)
    AttentionMaskInterface.register(IMPLEMENTATION, chunked_mask)
    config, before = model.config, model.config._attn_implementation
    config._attn_implementation = IMPLEMENTATION
    try:
        yield
    finally:
        config._attn_implementation = before
