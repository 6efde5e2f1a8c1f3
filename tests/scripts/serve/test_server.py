"""`dynattn serve` over loopback: chat completions, streamed and at once, are the tokens of `generate`."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from cases.checkpoints import edit_config
from cases.models import SMALL, make_model
from cases.processes import free_port
from cases.serving import make_tokenizer, running_server, save_with_tokenizer
from cases.vision_models import strengthen
from packaging.version import Version
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.cli.serving.utils import GenerationState

from dynattn import DCFormerConfig, DCFormerForCausalLM, RCMHAConfig, RCMHAForCausalLM, with_composed_heads
from dynattn.scripts import cli
from dynattn.scripts.serve import main as serve

NEW = 10
MESSAGES = ["hello", "What is 2 + 2?", "a", "Tell me everything that you know about attention heads. " * 3]


def part(name: str) -> ModuleType:
    """A module of the server, whose packages may be missing."""
    pytest.importorskip("fastapi", reason="pip install 'dynattn[serving]'")
    return import_module(f"dynattn.scripts.serve.{name}")


@pytest.fixture(scope="module")
def server() -> ModuleType:
    return part("server")


@pytest.fixture(scope="module")
def models() -> ModuleType:
    return part("models")


@pytest.fixture(scope="module")
def batching() -> ModuleType:
    return part("batching")


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, str]:
    """A DCFormer, and its folder with a tokenizer and a chat template."""
    model = make_model(max_position_embeddings=2048, eos_token_id=1, pad_token_id=0)
    return model, save_with_tokenizer(model, tmp_path_factory.mktemp("dcformer"))


@pytest.fixture(scope="module")
def port(server: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of a server that runs, with continuous batching."""
    number = free_port()
    command = [sys.executable, "-m", "dynattn.scripts.cli", "serve"]
    command += ["--continuous-batching", "--host", "127.0.0.1", "--port", str(number), "--cb-num-blocks", "64"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_CACHE", str(tmp_path_factory.mktemp("home") / "no-cache"))
        with running_server(command, number, Path.cwd()):
            yield number


def ask(port: int, model: str, content: str, timeout: float = 60, request_id: str = "", **options: Any) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": NEW, **options}
    return post(port, "chat/completions", body, timeout, request_id)


def post(port: int, endpoint: str, body: dict[str, Any], timeout: float = 60, request_id: str = "") -> str:
    """Transformers' server makes a name of the request if the client gives none."""
    address = f"http://127.0.0.1:{port}/v1/{endpoint}"
    headers = {"Content-Type": "application/json", "X-Request-ID": request_id}
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return answer.read().decode()


def streamed(text: str) -> str:
    """The content of all server-sent events."""
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


@torch.no_grad()
def expected(model: PreTrainedModel, content: str) -> str:
    tokenizer = make_tokenizer()
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": content}], return_tensors="pt")["input_ids"]
    tokens = model.generate(prompt, max_new_tokens=NEW, do_sample=False)[0, prompt.shape[1] :]
    return tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.slow
def test_chat_completions_at_the_same_time_are_those_of_generate(
    port: int, composed: tuple[PreTrainedModel, str]
) -> None:
    model, folder = composed
    answers = [expected(model, content) for content in MESSAGES]
    assert len(set(answers)) > 1
    with ThreadPoolExecutor(8) as clients:
        whole = list(clients.map(lambda content: ask(port, folder, content), MESSAGES))
        parts = list(clients.map(lambda content: ask(port, folder, content, stream=True), MESSAGES))
    assert [json.loads(answer)["choices"][0]["message"]["content"] for answer in whole] == answers
    assert [streamed(answer) for answer in parts] == answers


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"stream": True}], ids=["at once", "streamed"])
def test_a_request_that_does_not_fit_is_told_why_and_the_server_goes_on(
    port: int, composed: tuple[PreTrainedModel, str], options: dict[str, Any]
) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(port, composed[1], "hello", max_tokens=5000, **options)
    assert refused.value.code == 400
    error = json.loads(refused.value.read())["error"]  # of which OpenAI's client reads the message
    assert "needs more than max_position_embeddings (2048) positions" in error["message"]
    assert ask(port, composed[1], "hello", **options)


@pytest.mark.slow
def test_a_response_is_not_streamed_unless_the_client_asks(port: int, composed: tuple[PreTrainedModel, str]) -> None:
    model, folder = composed
    body = {"model": folder, "input": "hello", "max_output_tokens": NEW}
    answer = json.loads(post(port, "responses", body))
    assert answer["output"][0]["content"][0]["text"] == expected(model, "hello")


@pytest.mark.slow
def test_requests_of_one_name_at_the_same_time_get_their_own_answers(
    port: int, composed: tuple[PreTrainedModel, str]
) -> None:
    """Proxies send a request again under the same name if its answer takes long."""
    model, folder = composed
    asked = [(content, stream) for content in MESSAGES for stream in (False, True)]
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda one: ask(port, folder, one[0], stream=one[1], request_id="same"), asked))
    for (content, stream), answer in zip(asked, answers, strict=True):
        text = streamed(answer) if stream else json.loads(answer)["choices"][0]["message"]["content"]
        assert text == expected(model, content)


@pytest.mark.slow
def test_another_model_is_not_found(port: int, tmp_path: Path) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(port, str(tmp_path / "other"), "hello")
    assert refused.value.code == 404
    assert json.loads(refused.value.read())["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        ("chat/completions", {"messages": None}),
        ("chat/completions", {"messages": "hello"}),
        ("completions", {"prompt": "hello", "max_tokens": float("inf")}),
        ("responses", {"input": "hello", "tools": "hello"}),
    ],
)
def test_a_malformed_request_is_told_so(
    port: int, composed: tuple[PreTrainedModel, str], endpoint: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(port, endpoint, {"model": composed[1], **fields})
    assert refused.value.code == 400
    assert "malformed" in json.loads(refused.value.read())["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": ["a"]}, "continuous batching does not serve stop_strings=['a']"),
        ({"frequency_penalty": 0.5}, "continuous batching does not serve repetition_penalty=1.5"),
        ({"generation_config": '{"guidance_scale": 1.5}'}, "continuous batching does not serve guidance_scale=1.5"),
        ({"logit_bias": {"5": 1}}, "asks for sequence_bias={(5,): 1.0}, and all requests"),
        ({"logit_bias": {"5000": 1.0}}, "which is no sequence of tokens of the vocabulary"),
        ({"n": 2}, "n=2 is not supported"),
        ({"logit_bias": 5}, "logit_bias=5 must be an object"),
        ({"logprobs": True}, "logprobs=True is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format={'type': 'json_object'} is not supported"),
        ({"messages": [{"role": "nobody", "content": "hello"}]}, "the chat template: nobody speaks"),
    ],
)
def test_what_is_not_served_is_refused_after_the_first_request_too(
    port: int, composed: tuple[PreTrainedModel, str], options: dict[str, Any], message: str
) -> None:
    assert ask(port, composed[1], "hello", temperature=0)
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(port, composed[1], "hello", **options)
    assert refused.value.code == 400
    assert message in json.loads(refused.value.read())["error"]["message"]
    assert ask(port, composed[1], "hello")


@pytest.mark.slow
def test_fields_that_ask_for_nothing_are_accepted(port: int, composed: tuple[PreTrainedModel, str]) -> None:
    nothing = {"n": 1, "logprobs": False, "presence_penalty": 0.0, "response_format": {"type": "text"}, "user": "me"}
    answer = ask(port, composed[1], "hello", **nothing, top_logprobs=None)
    assert len(json.loads(answer)["choices"]) == 1


def handler(endpoint: str) -> Any:
    """What answers requests to an endpoint of a server without continuous batching."""
    module, _, name = endpoint.partition(".")
    return getattr(import_module(f"transformers.cli.serving.{module}"), name)(None, GenerationState())


@pytest.mark.parametrize(
    ("endpoint", "fields", "message"),
    [
        ("completion.CompletionHandler", {"logit_bias": {"5": 1}}, "logit_bias={'5': 1.0} is not supported"),
        ("response.ResponseHandler", {"previous_response_id": "r"}, "previous_response_id='r' is not supported"),
        ("response.ResponseHandler", {"conversation": "c"}, "conversation='c' is not supported"),
        ("response.ResponseHandler", {"text": {"format": {"type": "json_object"}}}, "text={'format': {'type': 'json_"),
        ("response.ResponseHandler", {"truncation": "auto"}, "truncation='auto' is not supported"),
        ("response.ResponseHandler", {"include": ["message.output_text.logprobs"]}, "include=['message.output_text"),
        ("response.ResponseHandler", {"moderation": {"model": "m"}}, "moderation={'model': 'm'} is not supported"),
        ("response.ResponseHandler", {"context_management": [{"type": "compaction"}]}, "context_management=[{'type':"),
        ("chat_completion.ChatCompletionHandler", {"moderation": {"model": "m"}}, "moderation={'model': 'm'} is not"),
        ("chat_completion.ChatCompletionHandler", {"tool_choice": "required"}, "tool_choice='required' is not"),
        ("chat_completion.ChatCompletionHandler", {"modalities": ["audio"]}, "modalities=['audio'] is not"),
        ("chat_completion.ChatCompletionHandler", {"function_call": {"name": "f"}}, "function_call={'name': 'f'} is"),
        ("chat_completion.ChatCompletionHandler", {"web_search_options": {}}, "web_search_options={} is not"),
    ],
)
def test_each_endpoint_refuses_what_it_would_ignore(endpoint: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        part("requests").check_fields(handler(endpoint), fields)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ('{"do_samples": true}', "generation_config has the unknown fields ['do_samples']"),
        ('{"num_return_sequences": 2}', "num_return_sequences=2 is not supported"),
        ("[1]", "generation_config='[1]' must be a string with a JSON object"),
        ("top_k", "generation_config='top_k' must be a string"),
        ({"top_k": 5}, "generation_config={'top_k': 5} must be a string"),
    ],
)
def test_settings_without_effect_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        part("requests").check_fields(handler("completion.CompletionHandler"), {"generation_config": settings})


def test_settings_of_generate_are_taken_as_transformers_writes_them() -> None:
    written = GenerationConfig(do_sample=True, num_return_sequences=1, stop_strings=["a"], eos_token_id=[1, 2])
    for text in (written.to_json_string(), written.to_json_string(use_diff=False)):
        part("requests").check_fields(handler("completion.CompletionHandler"), {"generation_config": text})


def test_the_engine_knows_no_two_requests_by_one_name() -> None:
    named = part("batching").with_own_name(lambda request_id: request_id)
    first, second = named(request_id="same"), named(request_id="same")
    assert first != second and first.startswith("same") and second.startswith("same")


def test_a_request_without_a_limit_does_not_get_that_of_the_first_one(batching: ModuleType) -> None:
    """Which started the engine; a client leaves the limit open by a `generation_config` without one."""
    model, engine = make_model(max_position_embeddings=16), batching.CBGenerateManager()
    first = GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1)
    try:
        batching.check_and_start_batching(engine, model, first)
        manager: Any = engine._cb
        limits = [first.max_new_tokens, None]
        names = [manager.add_request([3, 4, 5], max_new_tokens=limit, streaming=True) for limit in limits]
        results = {name: list(manager.request_id_iter(name))[-1].generated_tokens for name in names}
    finally:
        engine.stop()
    assert [len(results[name]) for name in names] == [2, 13]


@pytest.mark.parametrize("limits", [{"max_length": 8}, {}], ids=["max_length", "none"])
def test_a_request_is_answered_within_its_own_limit_and_told_that_it_was_cut(
    batching: ModuleType, limits: dict[str, int]
) -> None:
    """The server reports `length` where the answer is as long as `max_new_tokens` of the request's configuration."""
    model, engine = make_model(max_position_embeddings=16), batching.CBGenerateManager()
    asked = GenerationConfig(do_sample=False, eos_token_id=-1, **limits)

    async def answer() -> Any:
        words: Any = (engine, model, make_tokenizer(), {"input_ids": [3, 4, 5]}, asked)
        return await batching.with_limit(batching.answer_whole)(*words, request_id="one")

    first = GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1)
    try:
        batching.check_and_start_batching(engine, model, first)
        _, _, tokens = asyncio.run(answer())
    finally:
        engine.stop()
    assert len(tokens) == asked.max_new_tokens == (5 if limits else 13)


def test_the_tokens_of_a_speculative_stream_are_counted_each(monkeypatch: pytest.MonkeyPatch) -> None:
    streamer_class, requests = import_module("transformers.cli.serving.utils").DirectStreamer, part("requests")
    monkeypatch.setattr(streamer_class, "put", requests.stream_each_token)
    loop, tokenizer, told = asyncio.new_event_loop(), make_tokenizer(), asyncio.Queue[Any]()
    streamer = streamer_class(tokenizer._tokenizer, loop, told)
    answer = tokenizer("What is 2 + 2?", return_tensors="pt")["input_ids"]
    for tokens in (torch.tensor([[3, 4]]), answer[:, :5], answer[0, 5:6], answer[:, 6:]):  # the first are the prompt
        streamer.put(tokens)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert "".join(told.get_nowait() for _ in range(told.qsize())) == "What is 2 + 2?"
    assert streamer.total_tokens == answer.shape[1]


@pytest.mark.parametrize(("opening", "is_read"), [("<|assistant|>\n", False), ("<|im_start|>assistant\n", True)])
def test_answers_are_read_in_the_format_that_the_chat_template_has(opening: str, is_read: bool) -> None:
    """By Qwen's format, which Transformers takes for all models of its types, others would begin with the prompt."""
    requests, tokenizer = part("requests"), make_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if add_generation_prompt %}" + opening + "{% endif %}"
    model: Any = SimpleNamespace(config=SimpleNamespace(model_type="qwen3"))
    assert (requests.find_fitting_template(tokenizer, model) is not None) is is_read
    tokenizer.response_template = {"start_anchor": "its own"}
    assert requests.find_fitting_template(tokenizer, model) == tokenizer.response_template


def test_an_error_within_a_stream_is_json() -> None:
    message = 'a "word"\nand \\'
    told = part("requests").StreamError(message).msg
    assert json.loads(f'{{"error": "{told}"}}') == {"error": message}
    event = import_module("openai.types.responses").ResponseErrorEvent(type="error", sequence_number=0, message=told)
    assert json.loads(event.model_dump_json())["message"] == message


@pytest.mark.parametrize(("name", "refused"), [("here@main", False), ("other@main", True)])
def test_a_server_of_one_model_loads_no_other(server: ModuleType, models: ModuleType, name: str, refused: bool) -> None:
    manager = server.ModelManager.__new__(server.ModelManager)
    manager.force_model = "here"
    with pytest.raises(models.HTTPException, match="pinned to 'here'") if refused else nullcontext():
        assert models.load_unless_pinned(manager, name)


@pytest.mark.parametrize("bias", [{"5": 100}, {}], ids=["whole number", "none"])
def test_generate_takes_stops_and_biases_as_clients_write_them(bias: dict[str, int]) -> None:
    requests = part("requests")
    answering, model = handler("chat_completion.ChatCompletionHandler"), make_model(eos_token_id=1, pad_token_id=0)
    request = {"max_tokens": 3, "stop": [], "logit_bias": bias}
    requests.check_fields(answering, request)
    asked = answering._build_generation_config(request, model.generation_config)
    tokens = model.generate(torch.tensor([[3, 4]]), generation_config=asked, tokenizer=make_tokenizer())
    assert (tokens[0, 2:] == 5).all() == bool(bias)


@pytest.mark.parametrize(
    ("place", "message"), [("a b", "there is no folder a b"), (".", ". is an empty folder"), ("x", "x is a file")]
)
@pytest.mark.usefixtures("server")
def test_what_is_no_checkpoint_is_refused_before_the_server_starts(
    place: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if place == "x":
        (tmp_path / "x").touch()
    assert cli.main(["serve", place]) == 2
    assert message in capsys.readouterr().err


def test_the_home_folder_is_expanded_where_a_shell_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server itself is replaced, so that the packages that it needs may be missing."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(serve, "PACKAGES", ())
    monkeypatch.setitem(sys.modules, "dynattn.scripts.serve.server", SimpleNamespace(run=list))
    assert serve.main(["~/model", "--port", "80"]) == ["/home/me/model", "--port", "80"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--log-level", "nope"], "--log-level nope is no level; give one of "),
        (["--port", "99999"], "--port 99999 is no port; give one from 0 (any that is free) to 65535"),
        (["--port=-1"], "--port -1 is no port"),
        (["--device", "cuda:99"], "device 'cuda:99' cannot be used: "),
        (["--device", "99"], "device 'cuda:99' cannot be used: "),
        (["--attn-implementation", "nope"], "Unsupported attention implementation: 'nope'"),
        (["--por", "8000"], "there is no option --por; `transformers serve --help` lists all\n"),
    ],
)
@pytest.mark.usefixtures("server")
def test_impossible_options_are_refused_in_one_line(
    options: list[str], message: str, composed: tuple[PreTrainedModel, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", composed[1], *options]) == 2
    assert f"dynattn serve: error: {message}" in capsys.readouterr().err


def test_a_name_that_is_neither_here_nor_on_the_hub_is_told_so(
    server: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("We couldn't connect to the Hub.\nCheck your internet connection")

    monkeypatch.setattr(server, "app", refuse)
    monkeypatch.setattr(server, "offline_if_unreachable", ExitStack)
    assert cli.main(["serve", "nobody/nothing"]) == 2
    told = "nobody/nothing is no folder here, and the Hub did not give it: We couldn't connect to the Hub; check the"
    assert told in capsys.readouterr().err


def manager_of(models: ModuleType, folder: str, **options: Any) -> Any:
    """Transformers' manager of models, as `dynattn serve` changes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models.ModelManager, "_validate_args", models.check_model_options)
        patch.setattr(models.ModelManager, "_load_model", models.load_language_model)
        models.show_models_to_server()
        return models.ModelManager(device="cpu", force_model=folder, **options)


def test_a_model_is_served_with_an_implementation_of_this_package(
    models: ModuleType, composed: tuple[PreTrainedModel, str]
) -> None:
    manager = manager_of(models, composed[1], attn_implementation="chunked")
    assert manager.loaded_models[composed[1]].model.config._attn_implementation == "chunked"


def test_a_model_of_transformers_is_served_with_its_composed_heads(models: ModuleType, tmp_path: Path) -> None:
    """Not by the class to which they were added, which would drop their weights."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = LlamaConfig(**sizes, vocab_size=97, initializer_range=0.3, eos_token_id=1, pad_token_id=0)
    model = with_composed_heads(LlamaForCausalLM, compose_rank=1)(config).eval()
    strengthen(model)
    folder = save_with_tokenizer(model, tmp_path)
    served = manager_of(models, folder).loaded_models[folder].model
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(served(ids).logits, model(ids).logits)
    engine = SimpleNamespace(_cb=None, _cb_config=ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32))
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    part("batching").check_and_start_batching(engine, served, settings)
    name = engine._cb.add_request(ids[0].tolist(), max_new_tokens=NEW)
    answer = next(part for part in engine._cb.request_id_iter(name) if part.is_finished())
    part("batching").stop_batching(SimpleNamespace(_cb_manager=engine))
    assert answer.generated_tokens == model.generate(ids, settings)[0, 17:].tolist()
    edit_config(tmp_path, model_type="gemma3", architectures=["ComposedGemma3ForConditionalGeneration"])
    with pytest.raises(ValueError, match="also reads pictures or sound; with composed heads only models of text are"):
        models.load_language_model(SimpleNamespace(trust_remote_code=False), folder)


def test_a_model_without_a_head_is_refused(models: ModuleType, tmp_path: Path) -> None:
    make_model().model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"the class DCFormerModel that .* names is no language model"):
        manager_of(models, str(tmp_path))


@pytest.mark.slow
def test_models_are_listed_where_the_hub_has_no_cache(port: int, composed: tuple[PreTrainedModel, str]) -> None:
    """Transformers lists folders that it has loaded since 5.24, and none before."""
    ask(port, composed[1], "hello")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=60) as answer:
        listed = json.loads(answer.read())
    assert listed["object"] == "list"
    loaded = [composed[1]] if Version(version("transformers")) >= Version("5.24") else []
    assert [model["id"] for model in listed["data"]] == loaded


@pytest.mark.slow
def test_rcmha_is_refused_with_our_message(port: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    folder = save_with_tokenizer(
        RCMHAForCausalLM(RCMHAConfig(vocab_size=SMALL["vocab_size"], eos_token_id=1)), tmp_path
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(port, folder, "hello")
    assert refused.value.code == 400
    assert "continuous batching keeps only keys and values of earlier tokens" in refused.value.read().decode()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.usefixtures("server")
def test_a_signal_ends_a_server_that_has_answered(
    number: int, composed: tuple[PreTrainedModel, str], tmp_path: Path
) -> None:
    """The thread of continuous batching starts with the first request."""
    port, log = free_port(), tmp_path / "log"
    words = ["serve", composed[1], "--continuous-batching", "--port", str(port), "--cb-num-blocks", "64"]
    with log.open("w") as errors:
        command = [sys.executable, "-m", "dynattn.scripts.cli", *words]
        with running_server(command, port, tmp_path, stderr=errors) as server:
            assert ask(port, composed[1], "hello")
            server.send_signal(number)
            assert server.wait(30) == 128 + number
    lines = log.read_text().splitlines()
    assert lines[-1] == ("stopped by SIGTERM" if number == signal.SIGTERM else "interrupted")
    assert not any("Traceback" in line for line in lines)


@pytest.mark.slow
@pytest.mark.usefixtures("server")
def test_a_second_interrupt_ends_a_server_that_still_has_requests(
    composed: tuple[PreTrainedModel, str], tmp_path: Path
) -> None:
    """After the first one it answers them; those of clients that have gone would take minutes, too."""
    port = free_port()
    words = ["serve", composed[1], "--continuous-batching", "--port", str(port), "--cb-num-blocks", "64"]
    command = [sys.executable, "-m", "dynattn.scripts.cli", *words]
    with running_server(command, port, tmp_path, stderr=subprocess.DEVNULL) as server:
        assert ask(port, composed[1], "hello")
        with ThreadPoolExecutor(16) as clients:
            for _ in range(16):
                clients.submit(ask, port, composed[1], "hello", max_tokens=2000, timeout=1)
        server.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            server.wait(5)
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 128 + signal.SIGINT


def test_a_model_of_ones_own_is_shown_to_the_server(models: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnConfig(DCFormerConfig):
        model_type = "own_dcformer"

    class OwnForCausalLM(DCFormerForCausalLM):
        config_class = OwnConfig

    monkeypatch.setitem(AutoModelForCausalLM._model_mapping._extra_content, OwnConfig, OwnForCausalLM)
    for model_class in (OwnForCausalLM, DCFormerForCausalLM, RCMHAForCausalLM):
        monkeypatch.setattr(models.transformers, model_class.__name__, None, raising=False)
    models.show_models_to_server()
    for model_class in (OwnForCausalLM, DCFormerForCausalLM, RCMHAForCausalLM):
        assert vars(models.transformers)[model_class.__name__] is model_class


def answer_of(
    server: ModuleType, request: tuple[str, str, bytes], failure: Exception | None = None
) -> tuple[int, dict[bytes, bytes], Any]:
    """Status, headers and JSON for a method, path and body; an endpoint at `/v1/completions` raises `failure`."""
    application, (method, path, content) = server.FastAPI(), request

    @application.post("/v1/completions")
    def complete(body: dict[str, Any]) -> None:
        raise failure or AssertionError(body)

    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": content}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "query_string": b""}
    scope |= {"headers": [(b"content-type", b"application/json")]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "build_server", lambda *_, **__: application)
        telling = server.build_telling_server(ExitStack(), SimpleNamespace(), generation_state=None)
    with suppress(RuntimeError):  # Starlette raises what it answers with status 500 once more, for the log
        asyncio.run(telling(scope, receive, send))
    return sent[0]["status"], dict(sent[0]["headers"]), json.loads(sent[1]["body"])


@pytest.mark.parametrize(
    ("body", "told"), [(b'{"model": ', "JSON decode error"), (b"[]", "should be a valid dictionary"), (b"", "required")]
)
def test_what_is_no_json_object_is_refused_as_other_mistakes_are(server: ModuleType, body: bytes, told: str) -> None:
    status, _, answer = answer_of(server, ("POST", "/v1/completions", body))
    assert status == 400
    message = answer["error"]["message"]
    assert message.startswith("the request is malformed: ") and told in message


@pytest.mark.parametrize(
    ("request_", "status", "told"),
    [
        (("POST", "/v1/nothing", b"{}"), 404, "Not Found"),
        (("GET", "/v1/completions", b""), 405, "Method Not Allowed"),
        (("POST", "/v1/completions", b'"\xff"'), 400, "There was an error parsing the body"),
    ],
)
def test_what_no_endpoint_reads_is_refused_as_other_mistakes_are(
    server: ModuleType, request_: tuple[str, str, bytes], status: int, told: str
) -> None:
    found, headers, answer = answer_of(server, request_)
    assert (found, answer["error"]["message"]) == (status, told)
    assert headers.get(b"allow") == (b"POST" if status == 405 else None)


def test_every_reason_is_a_text_whose_form_clients_read(server: ModuleType) -> None:
    failures: list[Exception] = [
        import_module("fastapi").HTTPException(422, [{"msg": "no questions"}]),
        server.CBWorkerDeadError("no memory"),
        RuntimeError("a layer is broken"),
    ]
    told = [answer_of(server, ("POST", "/v1/completions", b"{}"), failure) for failure in failures]
    assert [(status, answer["error"]["message"]) for status, _, answer in told] == [
        (422, "[{'msg': 'no questions'}]"),
        (503, "no memory"),
        (500, "the server failed: RuntimeError: a layer is broken"),
    ]


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    assert cli.main(["serve", "somewhere"]) == 2
    assert "the server needs fastapi, uvicorn, openai; pip install 'dynattn[serving]'" in capsys.readouterr().err
