"""Requests that are computed together: what their settings may be, and what each has of its own."""

from collections.abc import Callable
from functools import wraps
from typing import Any
from uuid import uuid4

from transformers.cli.serving.utils import CBGenerateManager

from dynattn.modeling.serving.continuous_batching import ComposedBatchingManager
from dynattn.modeling.serving.requirements import check_joins, check_settings, new_token_limit, with_defaults_of

start_batching = CBGenerateManager.init_cb
answer_whole, answer_in_parts = CBGenerateManager.generate_non_streaming, CBGenerateManager.generate_streaming


def check_and_start_batching(engine: Any, model: Any, generation_config: Any) -> None:
    """In the place of `CBGenerateManager.init_cb`, which Transformers calls with the settings of each request.

    The first request starts the manager, and all others are computed with its settings, whatever theirs are. Its limits
    hold for itself alone: a request that sets none of its own has the model's.

    Raises:
        ValueError: a request asks for something that is not served, or for other settings than the first one.
    """
    start_batching(engine, model, generation_config)
    manager = engine._cb
    if isinstance(manager, ComposedBatchingManager):  # and not for a model of Transformers
        for name in ("max_new_tokens", "max_length"):
            setattr(manager.generation_config, name, getattr(model.generation_config, name))
        asked = with_defaults_of(model, generation_config)
        check_settings(manager.model.config.vocab_size, asked, manager.continuous_batching_config)
        check_joins(manager.generation_config, asked)


def with_own_name(answer: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method `answer` of `CBGenerateManager`, changed so that each request has a unique name in the engine.

    Clients choose names by the header `X-Request-ID`, and may repeat the name of a request that has not ended. Then the
    engine would give answers to the wrong client, or end.
    """

    @wraps(answer)
    def named(*args: Any, request_id: str, **options: Any) -> Any:
        return answer(*args, request_id=f"{request_id}/{uuid4()}", **options)

    return named


def with_limit(answer: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method `answer` of `CBGenerateManager`, changed so that each request has its own limit.

    A request without `max_new_tokens` gets it from its `max_length`, which the engine would not read, or from what
    positions and cache hold. Transformers' server compares answers with this number to report that they were cut.
    """

    @wraps(answer)
    def limited(engine: Any, model: Any, processor: Any, inputs: Any, asked: Any, **options: Any) -> Any:
        if asked.max_new_tokens is None and isinstance(engine._cb, ComposedBatchingManager):
            prompt = inputs["input_ids"]
            limit = new_token_limit(with_defaults_of(model, asked), len(prompt))
            asked.max_new_tokens = engine._cb.longest_answer(prompt, limit)
        return answer(engine, model, processor, inputs, asked, **options)

    return limited


def stop_batching(state: Any) -> None:
    """Ends the thread that computes requests together, which Transformers leaves running: the process would never end.

    Requests that are left, as after a second interrupt, get no answer.
    """
    engine = state._cb_manager
    if engine is not None and engine._cb is not None:
        engine._cb.stop(block=True, hard_stop=True)
