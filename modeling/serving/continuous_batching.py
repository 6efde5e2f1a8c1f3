"""Transformers' continuous batching for models with composed heads: `generate_batch`, its manager and its server."""

import threading
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.utils import WorkloadHints

from .cache_size import with_sizes
from .requirements import (
    check_joins,
    check_positions,
    check_request,
    check_settings,
    new_token_limit,
    room_for_answer,
    with_defaults_of,
)
from .served_model import ServedModel


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
