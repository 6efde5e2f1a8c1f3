"""Measures composition in each layer of a model: how large its terms are, and how alike heads are before and after."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dynattn.modeling.common.packed_documents import starts_by_positions
from dynattn.modeling.layers.composed_attention import ComposedAttention
from dynattn.modeling.ops.dcmha.composition import Composition
from dynattn.modeling.ops.dcmha.eager import AttentionMaps, dcmha_eager
from dynattn.modeling.ops.distance_tables import NO_TABLES, DistanceTables
from dynattn.modeling.ops.masking import both, visible_keys

from ...common.composition_measures import gate_share, head_similarity, maps_around, term_sizes

# The first tokens of a sequence that are measured. The maps of one layer at a time are in memory, for all heads.
TOKENS = 128


@torch.no_grad()
def measure_health(model: nn.Module, run: Any, item: dict[str, Tensor]) -> dict[str, float]:
    """Measures every composed layer in one forward pass.

    Args:
        run: runs `model` on a batch of tensors `[1, T]`.
        item: a sequence of tensors `[T]`. With `position_ids` that start anew, it packs several documents, which are
            kept apart as in training.

    Returns:
        For each layer and stage, under `LAYER.STAGE.NAME`: the size of each term (`term_sizes`), `gate_share`, and
        `similarity_before` and `similarity_after`, the `head_similarity` of the maps. Empty for a model that composes
        nothing.
    """
    found: dict[str, float] = {}
    batch = {name: tensor[None, :TOKENS] for name, tensor in item.items()}
    with _watched(model, found, _same_document(batch)):
        if _composed_layers(model):
            run(batch)
    return found


def _same_document(batch: dict[str, Tensor]) -> Tensor | None:
    """Which pairs of tokens of a batch of one row are in the same document, `[T, T]`; None if all are."""
    if "position_ids" not in batch:
        return None
    starts = starts_by_positions(batch["position_ids"])[0]
    return starts[:, None] == starts


def _composed_layers(model: nn.Module) -> list[ComposedAttention]:
    attentions = (module for module in model.modules() if isinstance(module, ComposedAttention))
    return [attention for attention in attentions if attention.composition is not None]


@contextmanager
def _watched(model: nn.Module, found: dict[str, float], same_document: Tensor | None) -> Iterator[None]:
    """In the block, each composed layer is measured after its forward pass, while its sharded weights are gathered."""
    look = partial(_look, found, same_document)
    hooks = [layer.register_forward_hook(look, with_kwargs=True) for layer in _composed_layers(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _look(
    found: dict[str, float],
    same_document: Tensor | None,
    layer: ComposedAttention,
    args: Any,
    kwargs: dict[str, Any],
    _: Any,
) -> None:
    """Forward hook: adds the measurements of one layer, for the hidden states `[B, T, E]` that it has just read."""
    hidden = args[0] if args else kwargs["hidden_states"]
    positions = args[1] if len(args) > 1 else kwargs.get("position_embeddings")
    tables = kwargs.get("tables", NO_TABLES)
    assert layer.composition is not None
    stages = dict(zip(("pre", "post"), layer.assemble(layer.composition(hidden)), strict=True))
    maps, visible = _attend(layer, hidden, positions, tables, stages, same_document)
    for stage, composition in stages.items():
        if composition is not None:
            name, sizes = f"{layer.layer_idx:02}.{stage}", term_sizes(composition)
            before, after = (head_similarity(one[0], visible) for one in maps_around(stage, maps, tables))
            found |= {f"{name}.{term}": size for term, size in sizes.items()}
            found[f"{name}.gate_share"] = gate_share(sizes)
            found |= {f"{name}.similarity_before": before, f"{name}.similarity_after": after}


def _attend(
    layer: ComposedAttention,
    hidden: Tensor,
    positions: tuple[Tensor, Tensor] | None,
    tables: DistanceTables,
    stages: dict[str, Composition | None],
    same_document: Tensor | None,
) -> tuple[AttentionMaps, Tensor]:
    """The maps `[B, H, T, T]` of a layer for hidden states `[B, T, E]`, and which pairs are visible, `[T, T]`."""
    query, key, value = layer.project(hidden, positions)
    query, key, _ = layer.rotate_by_content(query, key, hidden)
    structure: dict[str, Any] = {"is_causal": layer.is_causal, "sliding_window": layer.sliding_window}
    mask = None if same_document is None else same_document.to(hidden.device)
    options = {**stages, **structure, "scaling": layer.scaling, "attention_mask": mask, "tables": tables}
    maps: dict[str, Tensor] = {}
    dcmha_eager(query, key, value, **options, hook=maps.setdefault)
    length = hidden.shape[1]
    visible = both(mask, visible_keys(length, length, **structure, device=hidden.device))
    everything = torch.ones(length, length, dtype=torch.bool, device=hidden.device)
    return AttentionMaps(**maps), everything if visible is None else visible
