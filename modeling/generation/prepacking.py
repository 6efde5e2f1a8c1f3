"""Prompts of different lengths, read without computing on padding (prepacking, arXiv 2404.09529)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from ..caches.composed_cache import ComposedLayerMixin
from ..caches.names import named_cache
from ..caches.offloading import update_layer
from ..common.activation_checkpointing import check_keeps_cache
from ..common.decoder_heads import causal_model_in
from ..common.input_checks import check_cached_length
from ..positions.rotary import batch_dependent_rope


@torch.no_grad()
def prepack(model: Any, prompts: Sequence[Tensor], past_key_values: Cache | None = None) -> dict[str, Any]:
    """Fills a cache with all tokens of some prompts but their last ones, without computing on padding.

    The prompts are packed side by side into rows as long as the longest of them. `generate` then runs the last token
    of each prompt first: `model.generate(**prepack(model, prompts))` gives what it gives for the prompts padded on the
    left. For `n` beams or sequences of each prompt give a cache and call its `batch_repeat_interleave(n)` before.

    Args:
        model: a DCFormer or DCPythia with a language modeling head, composed or plain, or PEFT's wrapper of one.
        prompts: token ids, each `[T]`, of any lengths from 1 on.
        past_key_values: an empty cache to fill, by default a `DynamicCache` with the model's windows.

    Returns:
        Keywords of `generate`: `input_ids` and `attention_mask`, both `[B, T]` with padding on the left, and under its
        name in the installed Transformers the cache, which holds `T - 1` tokens of each row.

    Raises:
        ValueError: the model has no language modeling head or keeps no cache, a prompt is empty or no tensor, the cache
            is not empty or has no room, or the rotary embedding depends on the longest prompt.
    """
    model = causal_model_in(model)
    check_keeps_cache(model)
    cache = DynamicCache(config=model.config) if past_key_values is None else past_key_values
    check_prepacking(model.config, prompts, cache)
    lengths = [len(prompt) for prompt in prompts]
    input_ids = torch.full((len(prompts), max(lengths)), padding_token(model), device=model.device)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, -len(prompt) :] = prompt
        attention_mask[row, -len(prompt) :] = 1
    if max(lengths) > 1:
        check_cached_length(None, input_ids[:, 1:], cache, model.config.sliding_window)
        fill(model, cache, input_ids, [length - 1 for length in lengths])
    return {"input_ids": input_ids, "attention_mask": attention_mask, **named_cache(cache)}


def fill(model: Any, cache: Cache, input_ids: Tensor, lengths: Sequence[int]) -> None:
    """Runs prompts packed, and fills `cache` with their tokens, padded on the left.

    Args:
        input_ids: `[B, T]`, padded on the left; the last column is not run.
        lengths: number of tokens of each row to run, those right before the last column.
    """
    length = max(lengths)
    row, start = first_fit(lengths, length)
    packed = input_ids.new_zeros(int(row.max()) + 1, length)
    # Positions go on through the unused end of a row, as if it belonged to the last prompt, which sees no later tokens.
    position_ids = torch.arange(length).expand_as(packed).clone()
    # The place of each token of a padded row in the packed rows, counted through all of them; 0 for padding.
    places = torch.zeros(len(lengths), length, dtype=torch.long)
    for prompt, count in enumerate(lengths):
        span = slice(int(start[prompt]), int(start[prompt]) + count)
        packed[row[prompt], span] = input_ids[prompt, -1 - count : -1]
        position_ids[row[prompt], span] = torch.arange(count)
        places[prompt, length - count :] = row[prompt] * length + torch.arange(span.start, span.stop)
    every_token = DynamicCache()  # no windows yet: they would keep the end of a packed row, not of each prompt
    model.model(packed, position_ids=position_ids.to(packed.device), past_key_values=every_token, use_cache=True)
    model.model.prepare_cache(cache)
    unpack(every_token, cache, places.to(packed.device))


def unpack(packed: Cache, cache: Cache, places: Tensor) -> None:
    """Appends to `cache` the tokens at `places` `[B, T]` in `packed`, counted through all of its rows."""
    layers: list[Any] = packed.layers
    for index, layer in enumerate(layers):
        keys, values = _rows(layer.keys, places), _rows(layer.values, places)
        factors = [_rows(layer.factors.keys, places)] if isinstance(layer, ComposedLayerMixin) else []
        layer.reset()
        update_layer(cache, keys, values, index, *factors)


def _rows(states: Tensor, places: Tensor) -> Tensor:
    """The tokens at `places` `[B, T]` of `states` `[N, H, T, D]`, counted through all rows, as `[B, H, T, D]`."""
    length = states.shape[2]
    return states[places // length, :, places % length].transpose(1, 2)


def first_fit(lengths: Sequence[int], room: int) -> tuple[Tensor, Tensor]:
    """Packs sequences of `lengths` into rows of `room` tokens: the longest first, each into the first row with room.

    Returns:
        The row of each sequence and its start in that row, both `[B]`.
    """
    row, start = torch.zeros(2, len(lengths), dtype=torch.long)
    ends: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        chosen = next((used for used, end in enumerate(ends) if end + lengths[index] <= room), len(ends))
        ends += [0] if chosen == len(ends) else []
        row[index], start[index] = chosen, ends[chosen]
        ends[chosen] += lengths[index]
    return row, start


def check_prepacking(config: Any, prompts: Sequence[Tensor], cache: Cache) -> None:
    """Raises ValueError unless `prepack` can run these prompts into this cache."""
    if not hasattr(config, "rope_of"):
        raise ValueError(f"a {config.model_type} cannot read packed prompts into a cache; pad them on the left")
    if rope_type := batch_dependent_rope(config):
        raise ValueError(
            f"rope_type {rope_type!r} rotates keys by angles that depend on the longest prompt; pad the prompts on the "
            "left instead"
        )
    shapes = [tuple(prompt.shape) if isinstance(prompt, Tensor) else prompt for prompt in prompts]
    if not shapes or any(not isinstance(prompt, Tensor) or prompt.ndim != 1 or not len(prompt) for prompt in prompts):
        raise ValueError(f"prompts of shapes {shapes} must be one or more tensors [T] of at least one token")
    if cache.get_seq_length() > 0:
        raise ValueError(f"the cache holds {int(cache.get_seq_length())} tokens already; give an empty one")


def padding_token(model: Any) -> int:
    """The token to pad with: that of `generate` or of the model; 0 if neither has one, since padding is masked."""
    return next((t for t in (model.generation_config.pad_token_id, model.config.pad_token_id) if t is not None), 0)
