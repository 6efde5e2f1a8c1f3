"""vLLM's pages, whose rows hold keys, values and composition factors, and the rows that the requests of a batch use.

vLLM gives each layer a cache `[blocks, H_kv, N, 2 * width]` in blocks of `N` tokens: the rows of keys and of values
(see `RowLayout`) side by side. Prefix caching, chunked prefill and preemption move whole blocks.
"""

from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, KVCacheSpec, SlidingWindowSpec

from ..paged_attention import LayerRows, RequestRows, Span
from ..paged_rows import RowLayout


class ComposedBackend(AttentionBackend):
    """Tells vLLM the layout of the pages. Its name is the one that vLLM reserves for backends of plugins."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> Any:
        """Raises NotImplementedError: `PagedAttention` computes attention, since it gets composition factors too."""
        raise NotImplementedError("layers with composed heads attend by PagedAttention")

    @staticmethod
    def get_builder_cls() -> "type[ComposedMetadataBuilder]":
        return ComposedMetadataBuilder

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """The layout in which all heads of a token are contiguous, as one row."""
        return (KVCacheLayout.LBNHC,)


class ComposedMetadata(AttentionMetadata):
    """The requests of a batch, for all layers of a group that shares its pages."""

    def __init__(self, common: CommonAttentionMetadata) -> None:
        self.common = common
        self._rows: dict[tuple[int, int | None], RequestRows] = {}

    @cached_property
    def lengths(self) -> list[int]:
        """The number of tokens of each request so far, those of this batch included."""
        return self.common.seq_lens[: self.common.num_reqs].tolist()

    def rows(self, block_size: int, sliding_window: int | None) -> RequestRows:
        """The rows that the requests attend to in a layer, without those before its window.

        vLLM may have given the blocks before the window to other requests already.
        """
        if (block_size, sliding_window) not in self._rows:
            self._rows[block_size, sliding_window] = self._find_rows(block_size, sliding_window)
        return self._rows[block_size, sliding_window]

    def _find_rows(self, block_size: int, sliding_window: int | None) -> RequestRows:
        """Computes what `rows` keeps: token `i` of block `b` is row `b * block_size + i`."""
        starts, blocks = self.common.query_start_loc_cpu.tolist(), self.common.block_table_tensor
        spans, tables, end = [], [], 0
        for request, length in enumerate(self.lengths):
            tokens = slice(starts[request], starts[request + 1])
            first = 0 if sliding_window is None else max(0, length - (tokens.stop - tokens.start) - sliding_window + 1)
            positions = torch.arange(first, length, device=blocks.device)
            tables.append(blocks[request, positions // block_size] * block_size + positions % block_size)
            spans.append(Span(tokens, slice(end, end + length - first)))
            end += length - first
        # vLLM marks tokens that must not be written by -1. They go to block 0, which it keeps from all requests.
        new_rows = self.common.slot_mapping[: self.common.num_actual_tokens].clamp(min=0)
        return RequestRows(spans, torch.cat(tables).long(), new_rows)


class ComposedMetadataBuilder(AttentionMetadataBuilder[ComposedMetadata]):
    """Makes the metadata of each step."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> ComposedMetadata:
        return ComposedMetadata(common_attn_metadata)


class ComposedPages(nn.Module, AttentionLayerBase):
    """The pages of one layer, which vLLM allocates."""

    kv_cache: Tensor  # [blocks, H_kv, N, 2 * width]; empty before vLLM has allocated it

    def __init__(self, layout: RowLayout, sliding_window: int | None, name: str, vllm_config: VllmConfig) -> None:
        super().__init__()
        self.layout, self.sliding_window, self.name = layout, sliding_window, name
        self.dtype = vllm_config.model_config.dtype
        self.kv_cache = torch.empty(0)
        vllm_config.compilation_config.static_forward_context[name] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return ComposedBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Tells vLLM the size of a row, and with a window that it may free rows before that."""
        block_size, layout = vllm_config.cache_config.block_size, self.layout
        sizes = {"num_kv_heads": layout.kv_heads, "head_size": layout.width, "head_size_v": layout.width}
        if self.sliding_window is None:
            return FullAttentionSpec(block_size=block_size, dtype=self.dtype, **sizes)
        window = self.sliding_window
        return SlidingWindowSpec(block_size=block_size, dtype=self.dtype, sliding_window=window, **sizes)

    def rows(self) -> LayerRows:
        """The rows of this layer, and which of them the batch uses; none when vLLM profiles a step without pages."""
        batch = get_forward_context().attn_metadata
        if batch is None:
            none = self.kv_cache.new_empty(0)
            return LayerRows(none, none, lambda key, value: None, RequestRows([], none, none))
        pages = self.kv_cache.transpose(1, 2)
        rows = pages.view(-1, *pages.shape[2:])  # [rows, H_kv, 2 * width]; a view, since new rows are written to it
        requests = batch[self.name].rows(self.kv_cache.shape[2], self.sliding_window)
        keys, values = rows.split(self.layout.width, dim=-1)

        def write(*new: Tensor) -> None:
            """Writes the rows of keys and of values, each `[T, H_kv, width]`; the batch may end with padding."""
            for cache, states in zip((keys, values), new, strict=True):
                cache[requests.new_rows] = states[: len(requests.new_rows)]

        return LayerRows(keys, values, write, requests)
