"""Transformers' continuous batching for models with composed heads: `generate_batch`, its manager and its server.

Transformers takes the width of the rows in its cache from `head_dim` of the model's configuration, and serves only
implementations of attention whose names it knows. So the manager here gets a `ServedModel` instead of the model. Its
configuration gives the width of rows that also hold composition factors, and it passes the cache to the model as a
`PagedAttention`.
"""

import copy
import functools
import os
import threading
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import CacheAllocator, FullAttentionCacheAllocator
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.utils import WorkloadHints, get_device_and_memory_breakdown

from .paged_attention import LayerRows, PagedAttention, RequestRows, Span
from .paged_rows import RowLayout
from .requirements import (
    check_joins,
    check_positions,
    check_request,
    check_settings,
    new_token_limit,
    room_for_answer,
    with_defaults_of,
)
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


class ComposedBatchingManager(ContinuousBatchingManager):
    """Transformers' manager, a thread that batches requests, for a `ServedModel`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.making_cache = threading.Lock()

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Does nothing, so that the implementation of attention stays; Transformers would choose one of its own."""

    def add_request(  # type: ignore[override]
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        **options: Any,
    ) -> str | None:
        """As in Transformers. Without any limit a request may generate until the positions or the cache end.

        Raises:
            ValueError: the model or the cache cannot serve the request, see `check_request`, `room_for_answer` and
                `new_token_limit`; or a request of this name has not ended.
        """
        if max_new_tokens is None:
            max_new_tokens = new_token_limit(self.generation_config, len(input_ids))
        max_new_tokens = self.longest_answer(input_ids, max_new_tokens)
        if self.background_thread_status.can_accept_new_requests() is None and self._is_unfinished(request_id):
            raise ValueError(
                f"request_id={request_id!r} is the name of a request that has not ended; give another one, or none"
            )
        return super().add_request(input_ids, request_id, max_new_tokens, **options)

    def longest_answer(self, input_ids: list[int], max_new_tokens: int | None) -> int | None:
        """How many tokens the answer to a prompt may have: what is asked for, or else what positions and cache hold.

        A manager that takes no requests any more may have no cache, so it returns `max_new_tokens`.

        Raises:
            ValueError: the model or the cache cannot serve the request, see `check_request` and `room_for_answer`.
        """
        check_request(self.model.config, input_ids, max_new_tokens)
        if self.background_thread_status.can_accept_new_requests() is not None:
            return max_new_tokens
        positions = self.model.config.max_position_embeddings - len(input_ids)
        return room_for_answer(self._make_cache(), len(input_ids), max_new_tokens, positions)

    def check_announced(self, hints: WorkloadHints) -> None:
        """Raises ValueError if the cache has no room for the longest request that `hints` announce.

        Only `generate_batch` announces requests. It logs the errors of `add_request`, and would return no answers.
        """
        if prompt := hints.max_prompt_length:
            asked = hints.max_generated_length or new_token_limit(self.generation_config, prompt)
            positions = self.model.config.max_position_embeddings - prompt
            room_for_answer(self._make_cache(), prompt, asked, positions)

    def start(self) -> None:
        """As in Transformers, but makes the cache before the thread, so that requests are checked against it."""
        self._make_cache()
        super().start()

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """As in Transformers, which stores a persistent manager on `self.model`; it is moved on to the real model."""
        super().stop(*args, **kwargs)
        served: Any = self.model
        kept = vars(served).pop("_cached_continuous_batching_manager", None)
        if kept is not None:
            served.model._cached_continuous_batching_manager = kept

    def _is_unfinished(self, request_id: str | None) -> bool:
        """Whether a request of this name is still computed, or waits for that.

        If two requests had one name, Transformers would give them the same rows. That ends the thread that computes all
        requests.
        """
        with self.input_queue.mutex:
            waiting = {state.request_id for state in self.input_queue.queue}
        scheduler = self.batch_processor.scheduler  # type: ignore[union-attr]
        return any(request_id in names for names in (waiting, scheduler.waiting_requests, scheduler.active_requests))

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        """As in Transformers, which returns the processor that there is, or else makes one."""
        is_new = self.batch_processor is None
        processor = super()._create_batch_processor()
        if is_new:
            forget_cancelled(processor)
        return processor

    def _make_cache(self) -> PagedAttentionCache:
        """Makes the cache, unless it is there, and returns it.

        Several threads may add the first requests. The size of the cache depends on the free memory of the current
        device, which need not be the model's.
        """
        weights = next(self.model.parameters())
        with self.making_cache, torch.cuda.device_of(weights):
            if self.batch_processor is None:
                self.batch_processor = self._create_batch_processor()
            return self.batch_processor.cache


def forget_cancelled(processor: ContinuousBatchProcessor) -> None:
    """Removes what handles the results of a cancelled request, too, which Transformers would keep forever.

    That is done where the scheduler drops the request, because until then results may come.
    """
    clear, router = processor.scheduler.clear_cancelled_requests, processor.output_router

    def clear_and_forget() -> list[RequestState]:
        cancelled = clear()
        with router._lock:
            for state in cancelled:
                router.result_handlers.pop(state.request_id, None)
        return cancelled

    processor.scheduler.clear_cancelled_requests = clear_and_forget  # type: ignore[method-assign]


def start_batching(
    model: PreTrainedModel,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: WorkloadHints | None = None,
) -> ComposedBatchingManager:
    """`model.init_continuous_batching` for a model with composed heads. Starting the manager starts the generation.

    As in `generate`, fields that `generation_config` leaves unset come from `model.generation_config`. A persistent
    manager that is still kept has the settings of its first call; a later call may give the same settings, or none.

    Raises:
        ValueError: serving does not support the model's positions or the settings, see `check_positions` and
            `check_settings`, or the kept manager has other ones; or the cache has no room for the longest request of
            `workload_hints`.
    """
    hints, config = workload_hints or WorkloadHints(), model.config.get_text_config(decoder=True)
    is_given = generation_config is not None
    generation_config = with_defaults_of(model, generation_config)
    kept = getattr(model, "_cached_continuous_batching_manager", None)
    if isinstance(kept, ComposedBatchingManager):
        if is_given:
            check_settings(config.vocab_size, generation_config, kept.continuous_batching_config)
            check_joins(kept.generation_config, generation_config)
        kept.check_announced(hints)
        return kept
    if generation_config.eos_token_id is None:
        generation_config.eos_token_id = -1  # what Transformers takes for "none"
    settings = continuous_batching_config or ContinuousBatchingConfig()
    check_positions(config)
    check_settings(config.vocab_size, generation_config, settings)
    served: Any = ServedModel(model)
    manager = ComposedBatchingManager(served, generation_config, with_sizes(served, settings, hints), hints)
    manager.check_announced(hints)
    return manager


def row_config(config: PreTrainedConfig, layout: RowLayout) -> PreTrainedConfig:
    """A copy of a model's configuration for Transformers' cache: the width of rows in place of the width of heads.

    Transformers reserves memory for complete masks and repeated keys unless the implementation is called
    FlashAttention. `PagedAttention` needs neither, because it reads rows by itself, so it is given that name.
    """
    seen = copy.copy(config)
    seen.head_dim, seen.num_key_value_heads = layout.width, layout.kv_heads
    seen._attn_implementation = "flash_attention_2"
    return seen


def with_sizes(
    served: ServedModel, settings: ContinuousBatchingConfig, hints: WorkloadHints
) -> ContinuousBatchingConfig:
    """A copy of the settings without options that only FlashAttention supports, and on a CPU with a size of the cache.

    By default Transformers takes most of the memory for its cache, which suits a GPU but not a CPU. There the default
    is room for twice the announced requests, or twice 64 of the longest; what they leave keeps prefixes of earlier
    ones. Where that is over a quarter of the memory, Transformers chooses, or beside a GPU, by whose memory it would
    choose, it is a quarter of the smaller memory.
    """
    settings = copy.copy(settings)
    settings.use_cuda_graph, settings.use_async_batching, settings.max_blocks_per_request = False, False, 0
    if settings.num_blocks is None and settings.max_memory_percent is None and served.device.type == "cpu":
        requests = min(hints.num_requests or 64, settings.max_requests_per_batch or 1024)
        answer = hints.max_generated_length  # 0 if not announced, as without `max_new_tokens`
        tokens = hints.max_prompt_length + answer if answer else served.config.max_position_embeddings
        pages = 2 * requests * (1 + tokens // settings.page_size)
        layout = served.layers.layout
        page_bytes = 2 * settings.page_size * layout.kv_heads * layout.width * served.dtype.itemsize
        room, is_beside_gpu = free_memory(served)
        fitting = room / 4 / (served.config.num_hidden_layers * page_bytes)
        if pages < fitting:
            settings.num_blocks = pages
        elif is_beside_gpu:
            settings.num_blocks = max(1, int(fitting))
    return settings


def free_memory(served: ServedModel) -> tuple[int, bool]:
    """How many bytes a model on a CPU leaves free, and whether there is a GPU in the machine.

    Then Transformers tells of the GPU's memory, and refuses a cache that is larger than it: the smaller one counts.
    """
    device, total, _, allocated = get_device_and_memory_breakdown()
    if device.type == "cpu":
        return total - allocated, False
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total - allocated, memory - served.get_memory_footprint()), True


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
