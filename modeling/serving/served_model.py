"""A model with composed heads as Transformers' continuous batching sees it.

Transformers takes the width of the rows in its cache from `head_dim` of the model's configuration, and serves only
implementations of attention whose names it knows. So it gets a `ServedModel` instead of the model. Its configuration
gives the width of rows that also hold composition factors, and it passes the cache to the model as a `PagedAttention`.
"""

import copy
import functools
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import CacheAllocator, FullAttentionCacheAllocator

from .paged_attention import LayerRows, PagedAttention, RequestRows, Span
from .paged_rows import RowLayout
from .served_layers import run_on_pages, served_layers


class ServedModel:
    """A model as Transformers' continuous batching sees it; all other attributes are the model's."""

    def __init__(self, model: PreTrainedModel) -> None:
        model.eval()  # as Transformers' manager does afterwards; in training some models skip layers
        self.model, self.layers = model, served_layers(model)
        self.config = row_config(model.config.get_text_config(decoder=True), self.layers.layout)
        # With a plan that splits heads, Transformers would divide those of rows among the processes. The layout already
        # has the heads of this process alone.
        self.tp_plan: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def eval(self) -> "ServedModel":
        """Switches the model to inference."""
        self.model.eval()
        return self

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cache: PagedAttentionCache,
        read_index: list[Tensor],
        write_index: list[Tensor],
        cu_seq_lens_q: Tensor,
        cu_seq_lens_k: dict[str, Tensor],
        logits_to_keep: Tensor | None = None,
        **_: Any,
    ) -> Any:
        """Runs the model on a batch of requests, which is one row of `T` tokens.

        Args:
            input_ids, position_ids: `[1, T]`.
            read_index: for each layer type, the numbers of the rows that the requests attend to, one request after the
                other; empty if no request has earlier tokens.
            write_index: for each layer type, the numbers of the rows for the new tokens.
            cu_seq_lens_q, cu_seq_lens_k: where the requests start in the batch, and in each `read_index`.
            logits_to_keep: indices of the tokens whose logits are wanted; None for a model that always gives all.
        """
        starts = cu_seq_lens_q.tolist()
        requests = {
            name: find_requests(allocator, starts, cu_seq_lens_k[name].tolist(), read_index, write_index)
            for name, allocator in cache.cache_allocators.items()
        }
        rows = functools.partial(rows_of_layer, cache, requests)
        paged = PagedAttention(self.layers.layout, rows)
        kept = {} if logits_to_keep is None else {"logits_to_keep": logits_to_keep}
        return run_on_pages(self.model, paged, input_ids=input_ids, position_ids=position_ids, **kept)


def row_config(config: PreTrainedConfig, layout: RowLayout) -> PreTrainedConfig:
    """A copy of a model's configuration for Transformers' cache: the width of rows in place of the width of heads.

    Transformers reserves memory for complete masks and repeated keys unless the implementation is called
    FlashAttention. `PagedAttention` needs neither, because it reads rows by itself, so it is given that name.
    """
    seen = copy.copy(config)
    seen.head_dim, seen.num_key_value_heads = layout.width, layout.kv_heads
    seen._attn_implementation = "flash_attention_2"
    return seen


def find_requests(
    allocator: CacheAllocator,
    token_starts: list[int],
    row_starts: list[int],
    read_index: list[Tensor],
    write_index: list[Tensor],
) -> RequestRows:
    """The rows of all requests in the layers of one type; the arguments are those of `ServedModel`."""
    read, new_rows = read_index[allocator.index], write_index[allocator.index]
    tokens, rows = (map(slice, starts, starts[1:]) for starts in (token_starts, row_starts))
    spans = [span for parts in zip(tokens, rows, strict=True) if (span := Span(*parts)).new]
    # Without old rows to read, the rows of a request are those of its new tokens, in the same order.
    return RequestRows(spans, read if len(read) else new_rows, new_rows)


def rows_of_layer(cache: PagedAttentionCache, requests: dict[str, RequestRows], layer: int) -> LayerRows:
    """The rows of a layer in Transformers' cache."""
    allocator: Any = cache.layer_to_allocator[layer]
    own = requests[allocator.layer_type]
    # Layers that slide have pages of the same kind; only a table of pages, which is not needed here, do they lack. So
    # this method of other layers' allocators works for theirs too.
    key, value = FullAttentionCacheAllocator.get_cache_for_block_table(allocator, layer)

    def write(key_rows: Tensor, value_rows: Tensor) -> None:
        """Writes the rows `[T, H_kv, width]` of the new tokens; the empty index makes `update` read none."""
        allocator.update(key_rows, value_rows, layer, own.new_rows[:0], own.new_rows)

    # Pages of a window are used in turn, so the new rows of a chunk may replace those that its first tokens see.
    slides = allocator.layer_type == "sliding_attention"
    return LayerRows(key.flatten(0, 1), value.flatten(0, 1), write, own, overwrites=slides)
