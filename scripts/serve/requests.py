"""What clients may ask of Transformers' server: fields that it would ignore are refused, and errors have a message."""

import json
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cli.serving import utils
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseHandler

read_fields, stream_tokens = BaseHandler._validate_request, utils.DirectStreamer.put
find_answer_template = utils.get_response_template
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
    "function_call": ('"auto"', '"none"'),
    "web_search_options": (),
    "modalities": ('["text"]',),
    "prediction": (),
    "audio": (),
    "logit_bias": ("{}",),
    "tool_choice": ('"auto"', '"none"'),
    "text": ("{}", '{"format": {"type": "text"}}'),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": ("false",),
    "include": ("[]",),  # log probabilities, for example
    "truncation": ('"disabled"',),
    "moderation": (),
    "context_management": ("[]",),  # what shortens a long conversation
}
# Those that an endpoint ignores even without a warning.
UNREAD_FIELDS: dict[type[BaseHandler], set[str]] = {
    ChatCompletionHandler: {"moderation"},
    CompletionHandler: {"logit_bias"},
    ResponseHandler: {"conversation", "moderation", "context_management"},
}


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
    if body.get("generation_config") is not None:
        check_generation_config(body["generation_config"])


def check_generation_config(written: Any) -> None:
    """Raises ValueError unless this is an object in JSON with fields that `generate` reads, for a single answer.

    Transformers takes any names, so that a mistyped one would change nothing. Of several answers to one prompt its
    server returns the first, and streams the tokens of all as one text.
    """
    try:
        asked = json.loads(written)
    except (TypeError, ValueError):
        asked = None
    if not isinstance(asked, dict):
        raise ValueError(f"generation_config={written!r} must be a string with a JSON object")
    if unknown := sorted(asked.keys() - vars(GenerationConfig())):
        raise ValueError(f"generation_config has the unknown fields {unknown}; leave them out")
    if (answers := asked.get("num_return_sequences")) not in (None, 1):
        raise ValueError(f"num_return_sequences={answers!r} is not supported; leave it out, and send several requests")


def stream_each_token(streamer: utils.DirectStreamer, tokens: Tensor) -> None:
    """In the place of `DirectStreamer.put`, which takes the tokens `[1, N]` of speculative decoding for a single one.

    Then `usage` would count too few, and an answer that was cut by its limit would have the reason `stop`.
    """
    stream_tokens(streamer, tokens.flatten())


def find_fitting_template(processor: Any, model: PreTrainedModel) -> dict[str, Any] | None:
    """In the place of `utils.get_response_template`, which takes Qwen's format of answers for all models of its types.

    A model of such a type may have another chat template, as a new one of `dynattn pretrain` has. Its prompts lack the
    anchor of the format, for which the server would put the whole prompt, and the token that ends it, into the answer.
    """
    template = find_answer_template(processor, model)
    tokenizer = getattr(processor, "tokenizer", processor)
    if template is None or getattr(tokenizer, "response_template", None) is not None:
        return template
    anchors = template.get("start_anchor") or ""
    turn = [{"role": "user", "content": "a"}]
    prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return template if any(one in prompt for one in ([anchors] if isinstance(anchors, str) else anchors)) else None


class StreamError(utils._StreamError):
    """An error in the middle of a stream, whose message may have quotes and line breaks."""

    def __init__(self, msg: str) -> None:
        super().__init__(ErrorMessage(msg))


class ErrorMessage(str):
    """A text that f-strings escape, with which two endpoints put it between quotes; that of responses writes JSON."""

    def __format__(self, _: str) -> str:
        return json.dumps(self)[1:-1]


def malformation(error: RequestValidationError) -> str:
    """What is wrong with a request that is no JSON, or JSON of another kind, such as a list in place of an object."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")  # where the JSON cannot be read, the parser's message
    return f"the request is malformed: {first['msg']}{f' ({cause})' if cause else ''}"


def refusal(status: int, reason: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An error response in the format of OpenAI's API, whose clients raise an error with the `message`."""
    error = {"message": reason, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status, headers)
