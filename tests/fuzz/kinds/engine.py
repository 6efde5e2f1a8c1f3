"""A small serving engine: requests whose keys, values and factors are rows in pages, in a random order."""

from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dynattn.modeling.serving.paged_attention import LayerRows, PagedAttention, RequestRows, Span
from dynattn.modeling.serving.served_layers import ServedLayers, run_on_pages, served_layers


def serve(model: PreTrainedModel, ids: Tensor, first: int) -> Tensor:
    """Logits `[B, T, V]` of prompts `ids` `[B, T]`, of which one step computes the new tokens of all requests.

    A request begins with a chunk of `first` tokens, or more in later rows, and goes on one by one: so steps hold chunks
    and single tokens, and requests that have ended are missing in them.
    """
    served, (batch, length) = served_layers(model), ids.shape
    places = torch.randperm(batch * length + 3)[: batch * length].unflatten(0, ids.shape)  # the row of every token
    size = (len(served.windows), 2, batch * length + 3, served.layout.kv_heads, served.layout.width)
    pools = torch.full(size, torch.nan)  # what was not written must not matter
    seen, logits = [0] * batch, [ids.new_empty(0, model.config.vocab_size, dtype=torch.float32)] * batch
    while min(seen) < length:
        ends = [min(length, one + (1 if one else first + 2 * row)) for row, one in enumerate(seen)]
        steps = [torch.arange(*bounds) for bounds in zip(seen, ends, strict=True)]
        tokens = torch.cat([row[step] for row, step in zip(ids, steps, strict=True)])
        paged = PagedAttention(served.layout, partial(rows_of, served, pools, places, seen, ends))
        inputs = {"input_ids": tokens[None], "position_ids": torch.cat(steps)[None]}
        found = run_on_pages(model, paged, **inputs).logits[0].split([len(step) for step in steps])
        logits = [torch.cat(parts) for parts in zip(logits, found, strict=True)]
        seen = ends
    return torch.stack(logits)


def rows_of(
    served: ServedLayers, pools: Tensor, places: Tensor, seen: list[int], ends: list[int], layer: int
) -> LayerRows:
    """The rows of a layer in a step from `seen` to `ends` tokens of every request, but those that its window hides."""
    spans, tables, new, tokens = [], [], [], 0
    for row, start, end in zip(places, seen, ends, strict=True):
        if start == end:
            continue
        window = served.windows[layer]
        begin = 0 if window is None else max(0, start - window + 1)
        before = sum(map(len, tables))
        spans.append(Span(slice(tokens, tokens + end - start), slice(before, before + end - begin)))
        tables.append(row[begin:end])
        new.append(row[start:end])
        tokens += end - start
    keys, values = pools[layer]
    new_rows = torch.cat(new)

    def write(key: Tensor, value: Tensor) -> None:
        keys[new_rows], values[new_rows] = key, value

    return LayerRows(keys, values, write, RequestRows(spans, torch.cat(tables), new_rows))
