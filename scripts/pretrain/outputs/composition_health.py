"""Measures composition in each layer of a model: how large its terms are, and how alike heads are before and after."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...common.composition_measures import gate_share, head_similarity, term_sizes
from ...common.composition_observation import LayerObservation, attention_through, count_layers

# The first tokens of a sequence that are measured. The maps of one layer at a time are in memory, for all heads.
TOKENS = 128


@torch.no_grad()
def measure_health(
    model: PreTrainedModel, run: Callable[[dict[str, Tensor]], Any], item: dict[str, Tensor]
) -> dict[str, float]:
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

    def measure(layer: int, observed: LayerObservation) -> None:
        for stage, composition in observed.stages.items():
            name, sizes = f"{layer:02}.{stage}", term_sizes(composition)
            before, after = (head_similarity(maps[0], observed.visible) for maps in observed.around(stage))
            found.update({f"{name}.{term}": size for term, size in sizes.items()})
            found[f"{name}.gate_share"] = gate_share(sizes)
            found.update({f"{name}.similarity_before": before, f"{name}.similarity_after": after})

    if count_layers(model):
        # A compiled model runs uncompiled here, since it would be compiled anew for the other attention.
        with attention_through(model, keep=measure), torch.compiler.set_stance("force_eager"):
            run({name: tensor[None, :TOKENS] for name, tensor in item.items()})
    return found
