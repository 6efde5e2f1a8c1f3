"""Edits in the middle of a cached prompt (positional integrity encoding, arXiv 2407.03157)."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ..caches.composed_cache import ComposedDynamicLayer
from ..positions.rotary import batch_dependent_rope, rotary_of, rotate

# What cached keys and values of these schemes know of positions is nothing, or a rotation that can be undone.
EDITABLE = ("rope", "none", "alibi", "t5")


@torch.no_grad()
def edit_cache(model: Any, cache: Cache, start: int, stop: int, input_ids: Tensor) -> Cache:
    """Replaces the cached tokens from `start` up to `stop`, without running what follows them again.

    The new tokens are run on the tokens before them. Those behind keep their values and composition factors, and their
    keys are turned on to their new positions. With a single layer that is what running everything again gives. With
    more it is an approximation: the hidden states behind the edit have not seen it.

    Args:
        model: a DCFormer or DCPythia with a head.
        cache: a `DynamicCache` that the model filled with rows without padding; it is edited in place, and left as it
            was if the model raises.
        start, stop: places of the tokens to replace, the same in every row; equal ones only insert.
        input_ids: the new tokens `[B, m]`; none (`m = 0`) only delete.

    Returns:
        `cache`.

    Raises:
        ValueError: the tokens are not in the cache, or the positions or the cache of the model cannot be edited.
    """
    check_edit(model.config, cache, start, stop, input_ids)
    before = [state for layer in cache.layers for state in _states(layer)]
    try:
        _edit(model, cache, start, stop, input_ids)
    except BaseException:  # also one that interrupts: half of the layers would have been cut
        for layer, keys, values in before:
            layer.keys, layer.values = keys, values
        raise
    return cache


def _edit(model: Any, cache: Cache, start: int, stop: int, input_ids: Tensor) -> None:
    """`edit_cache` for arguments that fit, with the new tokens `[B, m]`; an error leaves the cache half edited."""
    suffixes = [_cut(layer, start, stop) for layer in cache.layers]
    if input_ids.shape[1]:
        places = torch.arange(start, start + input_ids.shape[1], device=input_ids.device)[None]
        model(input_ids, past_key_values=cache, position_ids=places, use_cache=True)
    moved = start + input_ids.shape[1] - stop
    for layer, suffix, layer_type in zip(cache.layers, suffixes, model.config.layer_types, strict=True):
        embedding = rotary_of(model.model.rotary_emb, model.config, layer_type)
        if embedding is not None:
            suffix["keys"] = move_keys(suffix["keys"], moved, embedding.inv_freq)
        _append(layer, suffix)


def _states(layer: Any) -> list[tuple[Any, Tensor, Tensor]]:
    """A layer and what keeps its composition factors, if anything does, each with its keys and values now."""
    factors = _states(layer.factors) if isinstance(layer, ComposedDynamicLayer) else []
    return [(layer, layer.keys, layer.values), *factors]


def move_keys(key: Tensor, distance: int, inv_freq: Tensor) -> Tensor:
    """Turns rotated keys `[B, H_kv, S, D]` on by a distance, for inverse frequencies `[rotary_dim / 2]`.

    The factor that some variants put on cosines and sines is in the keys already.
    """
    dtype = torch.promote_types(key.dtype, torch.float32)
    angles = distance * inv_freq.to(key.device, dtype)
    angles = torch.cat((angles, angles))[None, None]
    return rotate(key, angles.cos(), angles.sin())


def check_edit(config: Any, cache: Cache, start: int, stop: int, input_ids: Tensor) -> None:
    """Raises ValueError unless a cache of a model can be edited so; arguments are those of `edit_cache`."""
    if unknown := sorted(config.schemes - set(EDITABLE)):
        raise ValueError(f"position_scheme {unknown[0]!r} leaves positions in the cache; run the edited prompt again")
    if rope_type := batch_dependent_rope(config):
        raise ValueError(f"rope_type {rope_type!r} turns keys by the length of the prompt; run the edited one again")
    kinds = {type(layer) for layer in cache.layers}
    if kinds - {DynamicLayer, ComposedDynamicLayer} or len(cache.layers) != config.num_hidden_layers:
        names = sorted(kind.__name__ for kind in kinds)
        raise ValueError(
            f"a cache of {len(cache.layers)} layers of {names} cannot be edited: every layer has to keep all tokens; "
            "fill a DynamicCache() made without a configuration, and use full attention"
        )
    length = cache.get_seq_length()
    if length == 0:
        raise ValueError("the cache holds no tokens to edit; run the model on a prompt with it first")
    if not 0 <= start <= stop <= length:
        raise ValueError(f"start ({start}) and stop ({stop}) must be places among the {length} cached tokens, in order")
    rows = cache.layers[0].keys.shape[0]  # type: ignore[union-attr]
    if input_ids.ndim != 2 or input_ids.shape[0] != rows:
        raise ValueError(f"input_ids of shape {tuple(input_ids.shape)} must be [{rows}, m], as many rows as are cached")


def _cut(layer: Any, start: int, stop: int) -> dict[str, Tensor]:
    """Cuts a layer down to its first `start` tokens; returns what it keeps of those from `stop` on."""
    suffix = {"keys": layer.keys[:, :, stop:], "values": layer.values[:, :, stop:]}
    layer.keys, layer.values = layer.keys[:, :, :start], layer.values[:, :, :start]
    if isinstance(layer, ComposedDynamicLayer):
        factors = _cut(layer.factors, start, stop)
        suffix |= {f"factor_{name}": tensor for name, tensor in factors.items()}
    return suffix


def _append(layer: Any, suffix: dict[str, Tensor]) -> None:
    """Appends what `_cut` returned."""
    layer.keys = torch.cat([layer.keys, suffix["keys"]], dim=2)
    layer.values = torch.cat([layer.values, suffix["values"]], dim=2)
    if isinstance(layer, ComposedDynamicLayer):
        own = {name.removeprefix("factor_"): one for name, one in suffix.items() if name.startswith("factor_")}
        _append(layer.factors, own)
