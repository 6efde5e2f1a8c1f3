"""What composition does in each layer of a model: how large its terms are, and how alike it leaves the heads."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dynattn.modeling.layers.composed_attention import ComposedAttention
from dynattn.modeling.ops.dcmha.eager import compose
from dynattn.modeling.ops.masking import masked_softmax, visible_keys

from ...common.composition_measures import gate_share, head_similarity, term_sizes

# Tokens of one sequence that are looked at; their maps of all heads are in memory for one layer at a time.
TOKENS = 128


@torch.no_grad()
def measure_health(model: nn.Module, run: Any, item: dict[str, Tensor]) -> dict[str, float]:
    """Looks at every composed layer while `run` gives `item`, tensors `[T]`, to the model.

    Returns:
        For each layer and stage, named `LAYER.STAGE.WHAT`: the size of each term as `term_sizes` defines it;
        `gate_share`, the gates' part of the sum of their squares; `similarity_before` and `similarity_after`, of the
        heads' maps. Empty for a model that composes nothing.
    """
    found: dict[str, float] = {}
    with _watched(model, found):
        if any(layer.composition is not None for layer in _layers(model)):
            run({name: tensor[None, :TOKENS] for name, tensor in item.items()})
    return found


def _layers(model: nn.Module) -> list[ComposedAttention]:
    return [module for module in model.modules() if isinstance(module, ComposedAttention)]


@contextmanager
def _watched(model: nn.Module, found: dict[str, float]) -> Iterator[None]:
    """Measures each composed layer in the block behind its forward pass, while its weights are in one piece."""
    layers = [layer for layer in _layers(model) if layer.composition is not None]
    hooks = [layer.register_forward_hook(partial(_look, found), with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _look(found: dict[str, float], layer: ComposedAttention, args: Any, kwargs: dict[str, Any], _: Any) -> None:
    """Adds what one layer does with the `[B, T, E]` that it has just read."""
    hidden = args[0] if args else kwargs["hidden_states"]
    positions = args[1] if len(args) > 1 else kwargs["position_embeddings"]
    assert layer.composition is not None
    query, key, _value = layer._project(hidden, positions)
    pre, post = layer.assemble(layer.composition(hidden))
    length = hidden.shape[1]
    visible = visible_keys(length, length, is_causal=True, sliding_window=layer.sliding_window, device=hidden.device)
    assert visible is not None  # causal attention hides something
    repeats = query.shape[1] // key.shape[1]
    maps = query @ key.repeat_interleave(repeats, dim=1).mT * layer.scaling  # [B, H, T, S]
    for stage, composition in {"pre": pre, "post": post}.items():
        composed = maps if composition is None else compose(maps, composition)
        if composition is not None:
            name = f"{layer.layer_idx:02}.{stage}"
            sizes = term_sizes(composition)
            similar = {"before": head_similarity(maps[0], visible), "after": head_similarity(composed[0], visible)}
            found |= {f"{name}.{term}": size for term, size in sizes.items()}
            found[f"{name}.gate_share"] = gate_share(sizes)
            found |= {f"{name}.similarity_{when}": value for when, value in similar.items()}
        maps = masked_softmax(composed, visible)
