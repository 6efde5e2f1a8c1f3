"""Transformers' own server, able to load our models and to tell what was wrong with a request."""

from collections.abc import Sequence
from typing import Any

import click
import transformers
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from transformers.cli.serving import server
from transformers.cli.transformers import app

from dynattn.families import FAMILIES
from dynattn.modeling.serving.requirements import TRANSFORMERS, check_engine

from ..common.errors import UserError

CAUSAL_LM = "AutoModelForCausalLM"
build_server = server.build_server


def run(argv: Sequence[str]) -> int:
    """Runs `transformers serve` with these words until it is interrupted, and returns its exit status.

    Raises:
        UserError: this version of Transformers is not served, or refuses the options or the model.
    """
    try:
        check_engine("transformers", *TRANSFORMERS)
        show_models_to_server()
        server.build_server = build_telling_server
        app(["serve", *argv], standalone_mode=False)
    except click.ClickException as error:
        raise UserError(error.format_message()) from error
    except (ImportError, ValueError, OSError) as error:
        raise UserError(str(error)) from error
    return 0


def show_models_to_server() -> None:
    """Makes our language models attributes of the module `transformers`, in this process alone.

    There its server looks for the class that a configuration names. It does not ask the Auto classes, which know ours.
    """
    for family in FAMILIES.values():
        if CAUSAL_LM in family.model_names:
            setattr(transformers, family.model_names[CAUSAL_LM], family.load_model_class(CAUSAL_LM))


def build_telling_server(*args: Any, **kwargs: Any) -> FastAPI:
    """Transformers' application, which answers a request that cannot be served with the reason, as a fault of its own.

    Without this a client would get an internal error without a message, and the message would be in the log.
    """
    application = build_server(*args, **kwargs)
    application.add_exception_handler(ValueError, lambda _, error: JSONResponse({"detail": str(error)}, 400))
    return application
