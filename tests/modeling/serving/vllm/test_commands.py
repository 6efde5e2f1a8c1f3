"""`vllm serve` and `lm_eval --model vllm` with a model of ours, as users call them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from cases.models import make_model
from cases.processes import free_port
from cases.serving import make_tokenizer, running_server, save_with_tokenizer
from transformers import PreTrainedModel

# The server and lm-eval keep vLLM's engine in a process of its own.
APART = ["env", "VLLM_ENABLE_V1_MULTIPROCESSING=1", "VLLM_CPU_KVCACHE_SPACE=1"]  # the latter in GiB
TASK = "dynattn_owner"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model()


@pytest.fixture(scope="module")
def checkpoint(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_with_tokenizer(model, tmp_path_factory.mktemp("checkpoint"))


@torch.no_grad()
def log_likelihood(model: PreTrainedModel, context: str, answer: str) -> float:
    known, ids = (make_tokenizer()(text, return_tensors="pt")["input_ids"] for text in (context, context + answer))
    scores = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
    return float(scores[known.shape[1] - 1 :].sum())


def test_lm_eval_finds_the_log_likelihoods_of_transformers(
    checkpoint: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    arguments = ["--model", "vllm", "--model_args", f"pretrained={checkpoint},dtype=float32,max_model_len=512"]
    arguments += ["--tasks", TASK, "--limit", "40", "--output_path", str(tmp_path), "--log_samples"]
    subprocess.run([*APART, sys.executable, "-m", "dynattn.scripts.cli", "lm-eval", "run", *arguments], check=True)
    lines = next(tmp_path.rglob("samples_*.jsonl")).read_text(encoding="utf-8").splitlines()
    for sample in map(json.loads, lines):
        for asked, ((found, _),) in zip(sample["arguments"].values(), sample["resps"], strict=True):
            assert float(found) == pytest.approx(log_likelihood(model, asked["arg_0"], asked["arg_1"]), abs=1e-3)


@pytest.fixture(scope="module")
def client(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    port, vllm = free_port(), str(Path(sys.executable).with_name("vllm"))
    command = [*APART, vllm, "serve", checkpoint, "--served-model-name", "ours", "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    with (
        running_server(command, port, tmp_path_factory.mktemp("server")),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        yield client


def ask(prompt: str | list[dict[str, str]]) -> dict[str, object]:
    """A request for 24 greedy tokens, whatever they are."""
    given = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt, "stream": True}
    exact = {"temperature": 0.0, "ignore_eos": True, "skip_special_tokens": False}
    return {"model": "ours", "max_tokens": 24, **exact, **given}


@torch.no_grad()
def continuation(model: PreTrainedModel, text: str) -> str:
    """The answer of Transformers to `ask`."""
    tokenizer = make_tokenizer()
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    return tokenizer.decode(output[0, ids.shape[1] :])


def test_completions(client: httpx.Client, model: PreTrainedModel) -> None:
    text = 'The "for" statement is used to iterate over the elements of a sequence'
    answer = client.post("/v1/completions", json=ask(text)).raise_for_status().json()
    assert answer["choices"][0]["text"] == continuation(model, text)


def test_streamed_chat(client: httpx.Client, model: PreTrainedModel) -> None:
    messages = [{"role": "user", "content": "What is a list?"}]
    with client.stream("POST", "/v1/chat/completions", json=ask(messages)) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    pieces = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines]
    assert sum(map(bool, pieces)) > 10
    assert "".join(pieces) == continuation(model, make_tokenizer().apply_chat_template(messages, tokenize=False))
