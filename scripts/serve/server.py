"""Transformers' own server, extended to load this package's models and to say what is wrong with a request."""

from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from jinja2 import TemplateError
from starlette.exceptions import HTTPException
from transformers.cli.serving import server, utils
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import BaseHandler, CBGenerateManager, CBWorkerDeadError
from transformers.cli.transformers import app
from transformers.utils.logging import log_levels

from dynattn.modeling.serving.requirements import check_transformers

from ..common.checkpoint_files import check_has_config
from ..common.checkpoint_loading import check_place
from ..common.errors import UserError, first_line
from ..common.folder_names import absence
from ..common.offline import offline_if_unreachable
from .batching import (
    answer_in_parts,
    answer_whole,
    check_and_start_batching,
    stop_batching,
    with_limit,
    with_own_name,
)
from .models import check_model_options, list_models, load_language_model, load_unless_pinned, show_models_to_server
from .requests import StreamError, check_fields, find_fitting_template, malformation, refusal, stream_each_token

build_server = server.build_server


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


def replace_in_server() -> None:
    """Replaces what Transformers' server lacks for this package's models, in this process alone."""
    show_models_to_server()
    CBGenerateManager.init_cb = check_and_start_batching  # type: ignore[method-assign, assignment]
    CBGenerateManager.generate_non_streaming = with_own_name(with_limit(answer_whole))  # type: ignore[method-assign]
    CBGenerateManager.generate_streaming = with_own_name(with_limit(answer_in_parts))  # type: ignore[method-assign]
    BaseHandler._validate_request = check_fields  # type: ignore[method-assign, assignment]
    ModelManager._validate_args = check_model_options  # type: ignore[method-assign]
    ModelManager._load_model = load_language_model  # type: ignore[method-assign, assignment]
    utils.get_response_template = find_fitting_template
    utils._StreamError = StreamError  # type: ignore[misc]
    utils.DirectStreamer.put = stream_each_token  # type: ignore[method-assign, assignment]


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
