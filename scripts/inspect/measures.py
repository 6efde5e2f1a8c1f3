"""Measures compositions on a text: size, rank, similarity of heads, flow between heads, and the loss without a term."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from dynattn.modeling.ops.dcmha.composition import Composition

from ..common.composition_measures import (
    TERMS,
    effective_rank,
    head_similarity,
    pair_matrices,
    term_sizes,
    without_term,
)
from ..common.composition_observation import Change, LayerObservation, attention_through


def observe(model: PreTrainedModel, tokens: Tensor) -> tuple[list[LayerObservation], float]:
    """Returns what each layer computes for `tokens` `[1, T]`, and the loss as in `loss_of`."""
    layers: dict[int, LayerObservation] = {}
    loss = loss_of(model, tokens, keep=layers.__setitem__)
    return [layers[index] for index in sorted(layers)], loss


@torch.no_grad()
def loss_of(model: PreTrainedModel, tokens: Tensor, **hooks: Any) -> float:
    """The mean loss in nats of the tokens `[1, T]` after the first, each predicted from those before it.

    Args:
        hooks: those of `attention_through`.
    """
    with attention_through(model, **hooks):
        logits = model(tokens, use_cache=False).logits  # [1, T, V]
    return float(cross_entropy(logits[0, :-1].float(), tokens[0, 1:]))


def measure_layer(layer: LayerObservation) -> dict[str, Any]:
    """For each stage: size of its terms, distance from the identity, effective rank, similarity of heads around it."""
    return {stage: _measure_stage(layer, stage) for stage in layer.stages}


def _measure_stage(layer: LayerObservation, stage: str) -> dict[str, Any]:
    before, after = layer.around(stage)
    matrices = pair_matrices(layer.stages[stage])
    identity = torch.eye(matrices.shape[-1])
    distance = (matrices - identity).norm(dim=(-2, -1)) / len(identity) ** 0.5  # [1, T, S]
    visible = layer.visible  # [T, T]
    return {
        "terms": term_sizes(layer.stages[stage]),
        "distance": float(distance[0].expand(visible.shape)[visible].mean()),
        "effective_rank": effective_rank(matrices[0].expand(*visible.shape, -1, -1)[visible]),
        "similarity": [head_similarity(maps[0], visible) for maps in (before, after)],
    }


def head_flow(layer: LayerObservation, stage: str) -> Tensor:
    """How much each head's map contributes to each head's: `[H, H]`, indexed [in, out], a mean over visible pairs.

    What is off the diagonal of `post` are virtual heads: the probabilities of one head weigh the values of another.
    """
    maps, _ = layer.around(stage)
    mixing = pair_matrices(layer.stages[stage])[0]  # [T, S, H, H]
    sizes = (maps[0].permute(1, 2, 0)[..., None] * mixing).abs()  # [T, S, H, H]
    return sizes[layer.visible].mean(0)


def ablate(
    model: PreTrainedModel, tokens: Tensor, layers: Sequence[LayerObservation], loss: float
) -> list[dict[str, Any]]:
    """The loss for `tokens` `[1, T]` without each stage and without each of its terms, in all layers at once."""
    rows = []
    for stage, composition in layers[0].stages.items():
        present = term_sizes(composition)
        for term in ("all", *(name for name in TERMS if name in present)):
            changed = loss_of(model, tokens, change=leave_out(stage, term))
            rows.append({"stage": stage, "term": term, "loss": changed, "difference": changed - loss})
    return rows


def leave_out(stage: str, term: str) -> Change:
    """A change of compositions that leaves out a term of a stage, or the whole stage if `term` is "all"."""

    def change(layer: int, stages: dict[str, Composition]) -> dict[str, Composition]:
        kept = dict(stages)
        composition = kept.pop(stage, None)
        rest = None if composition is None or term == "all" else without_term(composition, term)
        return kept if rest is None else {**kept, stage: rest}

    return change
