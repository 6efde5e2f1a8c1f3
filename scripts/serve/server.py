"""Transformers' own server, extended to load this package's models and to say what is wrong with a request."""

import json
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from pathlib import Path
from typing import Any
from uuid import uuid4

import click
import transformers
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from huggingface_hub.errors import CacheNotFound
from jinja2 import TemplateError
from starlette.exceptions import HTTPException
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cli.serving import server, utils
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager, split_revision
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseHandler, CBGenerateManager, CBWorkerDeadError
from transformers.cli.transformers import app
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
from transformers.utils.logging import log_levels

from dynattn.modeling.layers.attention_interface import registered_implementations
from dynattn.modeling.other_models.compose_heads import composed_name, with_composed_heads
from dynattn.modeling.serving.continuous_batching import ComposedBatchingManager
from dynattn.modeling.serving.requirements import (
    check_joins,
    check_settings,
    check_transformers,
    new_token_limit,
    with_defaults_of,
)
from dynattn.remote_code import plain_classes

from ..common.checkpoint_files import check_has_config
from ..common.checkpoint_loading import check_place, find_device
from ..common.errors import UserError, first_line
from ..common.folder_names import absence
from ..common.offline import offline_if_unreachable

build_server = server.build_server
start_batching = CBGenerateManager.init_cb
answer_whole, answer_in_parts = CBGenerateManager.generate_non_streaming, CBGenerateManager.generate_streaming
read_fields = BaseHandler._validate_request
check_manager, load_model = ModelManager._validate_args, ModelManager._load_model
# Fields of OpenAI's API that Transformers' server ignores with a warning in its own log, so a client would not get what
# it asked for; and the values, in JSON, that ask for nothing.
IGNORED_FIELDS: dict[str, tuple[str, ...]] = {
    "n": ("1",),
    "best_of": ("1",),
    "logprobs": ("false",),  # 0 asks for those of the tokens themselves
    "top_logprobs": ("0",),
    "echo": ("false",),
    "presence_penalty": ("0", "0.0"),
    "response_format": ('{"type": "text"}',),
    "functions": ("[]",),
    "prediction": (),
    "audio": (),
    "logit_bias": ("{}",),
    "tool_choice": ('"auto"', '"none"'),
    "text": ("{}", '{"format": {"type": "text"}}'),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": ("false",),
}
# Those that an endpoint ignores even without a warning.
UNREAD_FIELDS: dict[type[BaseHandler], set[str]] = {
    CompletionHandler: {"logit_bias"},
    ResponseHandler: {"conversation"},
}


def run(argv: Sequence[str]) -> int:
    """Runs `transformers serve` with these arguments until it is interrupted, and returns its exit status.

    Raises:
        UserError: there is no such checkpoint, this version of Transformers is not supported, or it refuses the options
            or the model.
        KeyboardInterrupt: a signal ended the server.
    """
    names_model, is_folder = not argv[0].startswith("-"), Path(argv[0]).is_dir()
    if names_model:
        check_place(argv[0])
    if is_folder:
        check_has_config(Path(argv[0]))
    try:
        check_options(argv)
        check_transformers()
        replace_in_server()
        with ExitStack() as ends:
            server.build_server = partial(build_telling_server, ends)
            if not is_folder:
                ends.enter_context(offline_if_unreachable())
            app(["serve", *argv], standalone_mode=False)
    except click.Abort as stopped:  # Click's own name for what a signal raised
        raise stopped.__cause__ or KeyboardInterrupt from None
    except click.NoSuchOption as error:  # whose own message holds the description of every option
        raise UserError(f"there is no option {error.option_name}; `transformers serve --help` lists all") from error
    except click.ClickException as error:
        raise UserError(error.format_message()) from error
    except (ImportError, ValueError, OSError) as error:
        # What the Hub's errors are; those of the system have a number.
        is_absent = names_model and not is_folder and isinstance(error, OSError) and error.errno is None
        raise absence(argv[0], error) if is_absent else UserError(str(error)) from error
    return 0


def check_options(argv: Sequence[str]) -> None:
    """Raises UserError for values with which Transformers' server ends in a traceback, or listens on another port."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--log-level", nargs="?")
    parser.add_argument("--port", nargs="?")
    given, _ = parser.parse_known_args(argv)
    if given.log_level is not None and given.log_level.lower() not in log_levels:
        raise UserError(f"--log-level {given.log_level} is no level; give one of {', '.join(log_levels)}")
    if given.port is not None and given.port.lstrip("-").isdecimal() and not 0 <= int(given.port) < 2**16:
        raise UserError(f"--port {given.port} is no port; give one from 0 (any that is free) to {2**16 - 1}")


def check_model_options(manager: ModelManager) -> None:
    """In the place of `ModelManager._validate_args`, whose list of attention implementations lacks this package's.

    Raises:
        ValueError: Transformers does not know the implementation or the quantization.
        UserError: the device is not there.
    """
    if manager.device not in ("auto", "balanced", "balanced_low_0", "sequential"):
        find_device(f"cuda:{manager.device}" if isinstance(manager.device, int) else manager.device)
    name = manager.attn_implementation
    manager.attn_implementation = None if name in registered_implementations() else name
    check_manager(manager)
    manager.attn_implementation = name


def load_language_model(manager: ModelManager, name: str, *args: Any, **options: Any) -> Any:
    """In the place of `ModelManager._load_model`, which looks for the model's class in the module `transformers` alone.

    Raises:
        ValueError: the class is not there, or is one that Transformers would load without its composed heads.
    """
    show_composed_model_to_server(manager, name)
    try:
        return load_model(manager, name, *args, **options)
    except AttributeError as error:
        if not str(error).startswith("module transformers has no attribute"):
            raise
        raise ValueError(
            f"the class {first_line(error).rpartition(' ')[2]} that {name} names is no language model of Transformers "
            "or of this package; serve one that is, or give the module that registers yours with --import"
        ) from error


def replace_in_server() -> None:
    """Replaces what Transformers' server lacks for this package's models, in this process alone."""
    show_models_to_server()
    CBGenerateManager.init_cb = check_and_start_batching  # type: ignore[method-assign, assignment]
    CBGenerateManager.generate_non_streaming = with_own_name(with_limit(answer_whole))  # type: ignore[method-assign]
    CBGenerateManager.generate_streaming = with_own_name(with_limit(answer_in_parts))  # type: ignore[method-assign]
    BaseHandler._validate_request = check_fields  # type: ignore[method-assign, assignment]
    ModelManager._validate_args = check_model_options  # type: ignore[method-assign]
    ModelManager._load_model = load_language_model  # type: ignore[method-assign, assignment]
    utils._StreamError = StreamError  # type: ignore[misc]


def show_models_to_server() -> None:
    """Makes registered language models attributes of the module `transformers`, in this process alone.

    The server looks there for the class that a configuration names. It does not use the Auto classes, which know the
    models of this package and those of modules that `--import` names.
    """
    for model_class in AutoModelForCausalLM._model_mapping._extra_content.values():
        setattr(transformers, model_class.__name__, model_class)


def show_composed_model_to_server(manager: ModelManager, name: str) -> None:
    """Makes the class of a model of Transformers with composed heads, if `name` is one, such an attribute, too.

    Raises:
        ValueError: it also reads pictures or sound, for which the server takes the class from an Auto class.
    """
    place, revision = split_revision(name)
    config = AutoConfig.from_pretrained(place, revision=revision, trust_remote_code=manager.trust_remote_code)
    for plain in plain_classes(config).values():
        if config.model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES:
            raise ValueError(f"{name} also reads pictures or sound; with composed heads only models of text are served")
        setattr(transformers, composed_name(plain.__name__), with_composed_heads(plain))


def build_telling_server(ends: ExitStack, *args: Any, **kwargs: Any) -> FastAPI:
    """Transformers' application, changed so that clients learn which model it serves, and why a request failed.

    Otherwise a client would get an internal error without a message, which would only be in the log.

    Args:
        ends: is told what to do when the server ends.
        args: the first one is Transformers' `ModelManager`.
    """
    manager = args[0]
    manager.get_gen_models = partial(list_models, manager)
    manager.load_model_streaming = partial(load_unless_pinned, manager)
    ends.callback(stop_batching, kwargs["generation_state"])
    application = build_server(*args, **kwargs)
    # What Transformers reads without a check: a field that is missing, has another type, or is an infinite number.
    unchecked = (TypeError, AttributeError, OverflowError)
    application.exception_handlers |= {
        ValueError: lambda _, error: refusal(400, str(error)),
        RequestValidationError: lambda _, error: refusal(400, malformation(error)),
        KeyError: lambda _, error: refusal(400, f"the request lacks {error}"),
        **dict.fromkeys(unchecked, lambda _, error: refusal(400, f"the request is malformed: {error}")),
        # What a chat template refuses, such as a role that it does not know.
        TemplateError: lambda _, error: refusal(400, f"the chat template: {error}"),
        # An OSError without a number is Transformers' own, for a model that does not exist; others come from a disk.
        OSError: lambda _, error: refusal(404 if error.errno is None else 500, first_line(error)),
        # Starlette's own class, from which FastAPI's inherits: also for a path or method that no endpoint has.
        HTTPException: lambda _, error: refusal(error.status_code, str(error.detail), error.headers),
        # Any other failure, such as one inside the model; Starlette still logs its traceback.
        Exception: lambda _, error: refusal(500, f"the server failed: {type(error).__name__}: {first_line(error)}"),
        CBWorkerDeadError: lambda _, error: refusal(503, str(error)),
    }
    return application


def check_fields(handler: BaseHandler, body: dict[str, Any]) -> None:
    """In the place of `BaseHandler._validate_request`, which only warns of fields that it ignores.

    Also makes of `stop` and `logit_bias` what `generate` takes: clients send empty ones, and whole numbers as biases.
    Where OpenAI's API streams only if `stream` says so, the endpoint of responses would stream without it, too.

    Raises:
        ValueError: the request asks for something that the answer would lack.
    """
    read_fields(handler, body)
    if not isinstance(biases := body.get("logit_bias"), dict | None):
        raise ValueError(f"logit_bias={biases!r} must be an object with a number for each token")
    body["logit_bias"] = {token: float(bias) for token, bias in biases.items()} if biases else None
    body["stop"] = body.get("stop") or None
    body["stream"] = body.get("stream") or False
    ignored = handler._unused_fields | UNREAD_FIELDS.get(type(handler), set())
    for name in ignored & IGNORED_FIELDS.keys() & body.keys():
        if json.dumps(body[name]) not in ("null", *IGNORED_FIELDS[name]):
            raise ValueError(f"{name}={body[name]!r} is not supported; leave it out")


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


class StreamError(utils._StreamError):
    """An error in the middle of a stream, whose message Transformers' server puts between quotes without escaping."""

    def __init__(self, msg: str) -> None:
        super().__init__(json.dumps(msg)[1:-1])


def stop_batching(state: Any) -> None:
    """Ends the thread that computes requests together, which Transformers leaves running: the process would never end.

    Requests that are left, as after a second interrupt, get no answer.
    """
    engine = state._cb_manager
    if engine is not None and engine._cb is not None:
        engine._cb.stop(block=True, hard_stop=True)


def load_unless_pinned(manager: Any, name: str, gguf_file: str | None = None) -> Any:
    """In the place of `ModelManager.load_model_streaming`, which would load any model into a server of one.

    Raises:
        HTTPException: the server was started with another model.
    """
    if manager.force_model is not None:
        pinned, file = utils.split_model_id(manager.force_model)
        if (name, gguf_file) != (manager.process_model_name(pinned), file):
            raise HTTPException(400, f"Server is pinned to {manager.force_model!r}; requested {name!r}.")
    return type(manager).load_model_streaming(manager, name, gguf_file=gguf_file)


def list_models(manager: Any) -> list[dict[str, Any]]:
    """The model that the server was started with, or else those in the Hub's cache; empty if there is no cache."""
    if manager.force_model is not None:
        return [{"id": manager.force_model, "object": "model", "created": 0, "owned_by": ""}]
    try:
        return type(manager).get_gen_models()
    except CacheNotFound:
        return []


def malformation(error: RequestValidationError) -> str:
    """What is wrong with a request that is no JSON, or JSON of another kind, such as a list in place of an object."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")  # where the JSON cannot be read, the parser's message
    return f"the request is malformed: {first['msg']}{f' ({cause})' if cause else ''}"


def refusal(status: int, reason: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An error response in the format of OpenAI's API, whose clients raise an error with the `message`."""
    error = {"message": reason, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status, headers)
