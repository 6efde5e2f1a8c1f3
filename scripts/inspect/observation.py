"""Runs a model and keeps what its attention layers compute: maps before and after composing, and the compositions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from dynattn.modeling.layers.attention_interface import chunked_mask, mask_arguments
from dynattn.modeling.ops.dcmha.attention import dcmha_attention
from dynattn.modeling.ops.dcmha.composition import Composition
from dynattn.modeling.ops.dcmha.eager import AttentionMaps

IMPLEMENTATION = "observed"
STAGES = ("pre", "post")

# Takes the number of a layer and its compositions by stage, and returns those to compute with.
Change = Callable[[int, dict[str, Composition]], dict[str, Composition]]


@dataclass(frozen=True)
class LayerObservation:
    """What one layer computed. Maps are `[1, H, T, T]`, in float32."""

    stages: dict[str, Composition]  # those that the layer has, of STAGES
    maps: AttentionMaps

    @property
    def visible(self) -> Tensor:
        """`[1, H, T, T]`, boolean: the pairs of a query and a key that it sees."""
        assert self.maps.probs is not None
        return self.maps.probs != 0

    def around(self, stage: str) -> tuple[Tensor, Tensor]:
        """The maps `[1, H, T, T]` before and after a stage."""
        names = ("scores", "composed_scores") if stage == "pre" else ("probs", "composed_probs")
        before, after = (getattr(self.maps, name) for name in names)
        return before, after


@torch.no_grad()
def observe(model: PreTrainedModel, tokens: Tensor) -> tuple[list[LayerObservation], float]:
    """Returns what each layer computes for `tokens` `[1, T]`, and the mean loss of the tokens after the first."""
    layers: dict[int, LayerObservation] = {}

    def keep(layer: int, stages: dict[str, Composition], maps: AttentionMaps) -> None:
        layers[layer] = LayerObservation(stages, maps)

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
    keep: Callable[[int, dict[str, Composition], AttentionMaps], None] = lambda layer, stages, maps: None,
) -> Iterator[None]:
    """Lets the layers of `model` attend by the reference implementation, with changed compositions, and keeps maps."""

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        sliding_window: int | None = None,
        first_keys: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Queries `[1, H, T, D]`, keys and values `[1, H_kv, T, D]`; returns the output `[1, T, H, D]`."""
        given = {stage: options[stage] for stage in STAGES if options.get(stage) is not None}
        stages = change(module.layer_idx, given)
        masking: Any = mask_arguments(attention_mask, sliding_window)
        output, maps = dcmha_attention(
            query,
            key,
            value,
            pre=stages.get("pre"),
            post=stages.get("post"),
            scaling=scaling,
            first_keys=first_keys,
            return_maps=AttentionMaps._fields,
            **masking,
        )
        keep(module.layer_idx, stages, AttentionMaps(*(part.float() for part in maps if part is not None)))
        return output, None

    AttentionInterface.register(IMPLEMENTATION, attend)
    AttentionMaskInterface.register(IMPLEMENTATION, chunked_mask)
    config, before = model.config, model.config._attn_implementation
    config._attn_implementation = IMPLEMENTATION
    try:
        yield
    finally:
        config._attn_implementation = before
