"""Prompts of different lengths, read without computing on padding (prepacking, arXiv 2404.09529)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from ..caches.composed_cache import ComposedLayerMixin
from ..positions.rotary import batch_dependent_rope


@torch.no_grad()
def prepack(model: Any, prompts: Sequence[Tensor], past_key_values: Cache | None = None) -> dict[str, Any]:
    """Reads prompts without their last tokens, packed side by side in rows as long as the longest of them.

    `model.generate(**prepack(model, prompts))` is `generate` on prompts with padding on the left, and begins with the
    last token of each prompt.

    Args:
        model: a DCFormer or DCPythia with a head, composed or plain.
        prompts: token ids, each `[T]`, of any lengths from 1 on.
        past_key_values: an empty cache to fill, by default a `DynamicCache` of the model's windows.

    Returns:
        Keywords of `generate`: `input_ids` and `attention_mask`, both `[B, T]` with padding on the left, and
        `past_key_values`, which holds `T - 1` tokens of each row.

    Raises:
        ValueError: a prompt is empty, the cache is not, or what keys know of positions depends on the batch.
    """
    cache = DynamicCache(config=model.config) if past_key_values is None else past_key_values
    check_prepacking(model.config, prompts, cache)
    lengths = [len(prompt) for prompt in prompts]
    input_ids = torch.full((len(prompts), max(lengths)), padding_token(model), device=model.device)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, -len(prompt) :] = prompt
        attention_mask[row, -len(prompt) :] = 1
    if max(lengths) > 1:
        fill(model, cache, input_ids, [length - 1 for length in lengths])
    return {"input_ids": input_ids, "attention_mask": attention_mask, "past_key_values": cache}


def fill(model: Any, cache: Cache, input_ids: Tensor, lengths: Sequence[int]) -> None:
    """Runs the last `lengths` tokens before the last column of `input_ids` `[B, T]`, and fills `cache` with them."""
    length = max(lengths)
    row, start = first_fit(lengths, length)
    packed = input_ids.new_zeros(int(row.max()) + 1, length)
    # What is left of a row is a document of padding, so that it sees nothing.
    position_ids = torch.arange(length).expand_as(packed).clone()
    places = torch.zeros(len(lengths), length, dtype=torch.long)  # of each token of a padded row, in all packed ones
    end = torch.zeros(len(packed), dtype=torch.long)
    for prompt, count in enumerate(lengths):
        span = slice(int(start[prompt]), int(start[prompt]) + count)
        packed[row[prompt], span] = input_ids[prompt, -1 - count : -1]
        position_ids[row[prompt], span] = torch.arange(count)
        places[prompt, length - count :] = row[prompt] * length + torch.arange(span.start, span.stop)
        end[row[prompt]] = end[row[prompt]].clamp(min=span.stop)
    behind = torch.arange(length) - end[:, None]
    position_ids = torch.where(behind >= 0, behind, position_ids).to(packed.device)
    every_token = DynamicCache()  # without windows: those of the row are not those of its documents
    model.model(packed, position_ids=position_ids, past_key_values=every_token, use_cache=True)
    model.model.prepare_cache(cache)
    unpack(every_token, cache, places.to(packed.device))


def unpack(packed: Cache, cache: Cache, places: Tensor) -> None:
    """Appends to `cache` the tokens at `places` `[B, T]` of all rows of `packed` end to end."""
    layers: list[Any] = packed.layers
    for index, layer in enumerate(layers):
        keys, values = _rows(layer.keys, places), _rows(layer.values, places)
        factors = [_rows(layer.factors.keys, places)] if isinstance(layer, ComposedLayerMixin) else []
        layer.reset()
        cache.update(keys, values, index, *factors)


def _rows(states: Tensor, places: Tensor) -> Tensor:
    """`[N, H, T, D]` as `[B, H, T, D]`: the tokens at `places` `[B, T]` of all rows end to end."""
    return states.transpose(1, 2).flatten(0, 1)[places].transpose(1, 2)


def first_fit(lengths: Sequence[int], room: int) -> tuple[Tensor, Tensor]:
    """Row and start `[B]` of sequences of `lengths` in rows of `room` tokens: long ones first, where there is room."""
    row, start = torch.zeros(2, len(lengths), dtype=torch.long)
    ends: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        chosen = next((row for row, end in enumerate(ends) if end + lengths[index] <= room), len(ends))
        ends += [0] if chosen == len(ends) else []
        row[index], start[index] = chosen, ends[chosen]
        ends[chosen] += lengths[index]
    return row, start


def check_prepacking(config: Any, prompts: Sequence[Tensor], cache: Cache) -> None:
    """Raises ValueError unless `prepack` can read such prompts; the arguments are the same."""
    if not hasattr(config, "rope_of"):
        raise ValueError(f"a {config.model_type} cannot read packed prompts into a cache; pad them on the left")
    if rope_type := batch_dependent_rope(config):
        raise ValueError(f"rope_type {rope_type!r} turns keys by the longest prompt; pad the prompts on the left")
    shapes = [tuple(prompt.shape) for prompt in prompts]
    if not shapes or any(len(shape) != 1 or shape[0] < 1 for shape in shapes):
        raise ValueError(f"prompts of shapes {shapes} must be one or more tensors [T] of at least one token")
    if cache.get_seq_length() > 0:
        raise ValueError(f"the cache holds {int(cache.get_seq_length())} tokens already; give an empty one")


def padding_token(model: Any) -> int:
    """What stands before shorter prompts: the padding token of `generate`, or else any other."""
    return next((t for t in (model.generation_config.pad_token_id, model.config.pad_token_id) if t is not None), 0)
