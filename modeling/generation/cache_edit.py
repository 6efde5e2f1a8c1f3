"""Edits in the middle of a cached prompt (positional integrity encoding, arXiv 2407.03157)."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ..caches.composed_cache import ComposedDynamicLayer
from ..common.activation_checkpointing import check_keeps_cache
from ..common.decoder_heads import causal_model_in
from ..ops.dtypes import at_least_float32
from ..positions.carope import cached_phases, turn_cached_keys
from ..positions.rotary import batch_dependent_rope, rotary_of, rotate, rotates_layer

# Cached keys and values of these schemes hold no positions, or keys that are rotated by theirs and can be rotated on.
EDITABLE = ("rope", "carope", "none", "alibi", "t5")


@torch.no_grad()
def edit_cache(model: Any, cache: Cache, start: int, stop: int, input_ids: Tensor) -> Cache:
    """Replaces the cached tokens from `start` up to `stop`, without running the tokens after them again.

    The new tokens are run on the tokens before them. The tokens after them keep their values and composition factors,
    and their keys are rotated to their new positions. For a model of one layer the result is exact. With more layers it
    is an approximation, because the hidden states after the edit were computed from the old tokens.

    Args:
        model: a DCFormer or DCPythia with a language modeling head, or PEFT's wrapper of one.
        cache: a `DynamicCache` that the model filled with rows without padding. It is edited in place; if the model
            raises, it holds what it held before.
        start, stop: places of the tokens to replace, the same in every row; if they are equal, tokens are only
            inserted.
        input_ids: the new tokens `[B, m]`; with `m = 0`, tokens are only deleted.

    Returns:
        `cache`.

    Raises:
        ValueError: the tokens are not in the cache, or the positions or the cache of the model cannot be edited, or the
            model keeps no cache or has no such head.
    """
    model = causal_model_in(model)
    check_keeps_cache(model)
    check_edit(model.config, cache, start, stop, input_ids)
    before = [(part, part.keys, part.values) for part in _parts(cache)]
    try:
        _edit(model, cache, start, stop, input_ids)
    except BaseException:  # KeyboardInterrupt too, which would leave some layers cut and others not
        for part, keys, values in before:
            part.keys, part.values = keys, values
        raise
    return cache


def _edit(model: Any, cache: Cache, start: int, stop: int, input_ids: Tensor) -> None:
    """`edit_cache` with checked arguments and new tokens `[B, m]`; an error leaves the cache half edited.

    Layers are first cut down to the tokens before `start`, then the model appends the new ones, and then the tokens
    from `stop` on follow with moved keys.
    """
    config = model.config
    layers: list[tuple[Any, str]] = list(zip(cache.layers, config.layer_types, strict=True))
    ends = [
        _end_phases(config, layer.keys[:, :, :stop]) if config.scheme_of(layer_type) == "carope" else None
        for layer, layer_type in layers
    ]
    suffixes = {part: (part.keys[:, :, stop:], part.values[:, :, stop:]) for part in _parts(cache)}
    for part in suffixes:
        part.keys, part.values = part.keys[:, :, :start], part.values[:, :, :start]
    if input_ids.shape[1]:
        places = torch.arange(start, start + input_ids.shape[1], device=input_ids.device)[None]
        model(input_ids, past_key_values=cache, position_ids=places, use_cache=True)
    moved = start + input_ids.shape[1] - stop
    for index, ((layer, layer_type), end) in enumerate(zip(layers, ends, strict=True)):
        keys, values = suffixes[layer]
        embedding = rotary_of(model.model.rotary_emb, config, layer_type)
        if embedding is not None and rotates_layer(config, index):
            keys = move_keys(keys, moved, embedding.inv_freq)
        if end is not None:
            keys = turn_cached_keys(keys, _end_phases(config, layer.keys) - end)
        suffixes[layer] = keys, values
    for part, (keys, values) in suffixes.items():
        part.keys = torch.cat([part.keys, keys], dim=2)
        part.values = torch.cat([part.values, values], dim=2)


def _end_phases(config: Any, keys: Tensor) -> Tensor:
    """CARoPE's phases `[B, H_kv, 1, D / 2]` of the last of the cached `keys` `[B, H_kv, S, D + ...]`, 0 before any."""
    phases = cached_phases(keys[:, :, -1:], config.head_dim, at_least_float32(keys.dtype))
    return phases if keys.shape[2] else phases.new_zeros(*keys.shape[:2], 1, config.head_dim // 2)


def _parts(cache: Cache) -> list[Any]:
    """The layers of a cache and those of their factors, which also hold tokens as keys and values `[B, ., S, .]`."""
    factors = [layer.factors for layer in cache.layers if isinstance(layer, ComposedDynamicLayer)]
    return [*cache.layers, *factors]


def move_keys(key: Tensor, distance: int, inv_freq: Tensor) -> Tensor:
    """Rotates keys `[B, H_kv, S, D]`, which are rotated already, by a further `distance` of positions.

    Args:
        inv_freq: the inverse frequencies `[rotary_dim / 2]` of their rotary embedding. Its `attention_scaling`, which
            some variants multiply cosines and sines by, is in the keys already and is left out here.
    """
    dtype = at_least_float32(key.dtype)
    angles = distance * inv_freq.to(key.device, dtype)
    angles = torch.cat((angles, angles))[None, None]
    return rotate(key, angles.cos(), angles.sin())


def check_edit(config: Any, cache: Cache, start: int, stop: int, input_ids: Tensor) -> None:
    """Raises ValueError unless `edit_cache` can do this edit; the arguments are the same."""
    if not hasattr(config, "rope_of"):
        raise ValueError(f"the cache of a {config.model_type} cannot be edited; run the edited prompt again")
    if unknown := sorted(config.schemes - set(EDITABLE)):
        raise ValueError(
            f"position_scheme {unknown[0]!r} keeps positions in the cache that cannot be changed; run the edited "
            "prompt again"
        )
    if rope_type := batch_dependent_rope(config):
        raise ValueError(
            f"rope_type {rope_type!r} rotates keys by angles that depend on the length of the prompt; run the edited "
            "prompt again"
        )
    kinds = {type(layer) for layer in cache.layers}
    if kinds - {DynamicLayer, ComposedDynamicLayer} or len(cache.layers) != config.num_hidden_layers:
        names = sorted(kind.__name__ for kind in kinds)
        raise ValueError(
            f"a cache of {len(cache.layers)} layers of {names} cannot be edited: every layer has to keep all tokens; "
            "fill a DynamicCache() made without a configuration"
        )
    length = cache.get_seq_length()
    if length == 0:
        raise ValueError("the cache holds no tokens to edit; run the model on a prompt with it first")
    if not 0 <= start <= stop <= length:
        raise ValueError(f"start ({start}) and stop ({stop}) must be places among the {length} cached tokens, in order")
    rows = cache.layers[0].keys.shape[0]  # type: ignore[union-attr]
    if input_ids.ndim != 2 or input_ids.shape[0] != rows:
        raise ValueError(f"input_ids of shape {tuple(input_ids.shape)} must be [{rows}, m], as many rows as are cached")
