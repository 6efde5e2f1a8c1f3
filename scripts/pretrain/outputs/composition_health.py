"""What composition does in each layer of a model: how large its terms are, and how alike it leaves the heads."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dynattn.modeling.layers.composed_attention import ComposedAttention
from dynattn.modeling.ops.dcmha.composition import Composition
from dynattn.modeling.ops.dcmha.eager import compose
from dynattn.modeling.ops.masking import masked_softmax, visible_keys

# Tokens of one sequence that are looked at; their maps of all heads are in memory for one layer at a time.
TOKENS = 128


@torch.no_grad()
def measure_health(model: nn.Module, run: Any, item: dict[str, Tensor]) -> dict[str, float]:
    """Looks at every composed layer while `run` gives `item`, tensors `[T]`, to the model.

    Returns:
        For each layer and stage, named `LAYER.STAGE.WHAT`: `query_mix`, `key_mix`, `query_gate`, `key_gate` and
        `static`, the size of each term as `term_sizes` defines it; `gate_share`, the gates' part of the sum of their
        squares; `similarity_before` and `similarity_after`, of the heads' maps. Empty for a model that composes
        nothing.
    """
    found: dict[str, float] = {}
    with _watched(model, found):
        if any(layer.composition is not None for layer in _layers(model)):
            run({name: tensor[None, :TOKENS] for name, tensor in item.items()})
    return found


def term_sizes(composition: Composition) -> dict[str, float]:
    """The size of each term against the identity: the root mean square over tokens of its Frobenius norm by `sqrt(H)`.

    The identity has size 1, and a term of size `s` changes maps whose heads are uncorrelated by `s` times their norm.
    """
    squares: dict[str, Tensor] = {}
    for side in ("query", "key"):
        down, up, gate = composition.side(side)
        if down is not None and up is not None:
            squares[f"{side}_mix"] = _mix_squares(down, up, composition.groups)
        if gate is not None:
            squares[f"{side}_gate"] = gate.float().square().sum(-1)
    if composition.static is not None:
        squares["static"] = composition.static.float().square().sum()
    heads = next(iter(composition.tensors().values())).shape[-1]
    return {name: (value.mean() / heads).sqrt().item() for name, value in squares.items()}


def gate_share(sizes: dict[str, float]) -> float:
    """The gates' part of the sum of the squares of all terms; 0 where there are none."""
    squares = {name: size**2 for name, size in sizes.items()}
    total = sum(squares.values())
    return sum(square for name, square in squares.items() if name.endswith("gate")) / total if total else 0.0


def head_similarity(maps: Tensor, visible: Tensor) -> float:
    """The mean cosine between the maps `[H, T, S]` of two heads, over the pairs that are `visible` `[T, S]`."""
    rows = maps[:, visible].float()  # [H, visible pairs]
    rows = rows / rows.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    cosines = rows @ rows.T
    heads = len(rows)
    return ((cosines.sum() - cosines.trace()) / (heads * (heads - 1))).item()


def _mix_squares(down: Tensor, up: Tensor, groups: int) -> Tensor:
    """The squared Frobenius norms `[B, T]` of `sum_r down_r up_r'` in all groups, from factors `[B, T, R, H]`."""
    down, up = (factor.float().unflatten(-1, (groups, -1)).transpose(2, 3) for factor in (down, up))
    return ((down @ down.mT) * (up @ up.mT)).sum((-1, -2, -3))


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
    pre, post = layer.composition.assemble(layer.composition(hidden))
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
