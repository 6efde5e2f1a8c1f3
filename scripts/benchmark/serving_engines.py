"""The servers that `serving_report` compares: `generate` alone, Transformers' continuous batching, and vLLM."""

import argparse
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from dynattn import DCFormerConfig, DCFormerForCausalLM

ALONE = "generate"


class Answer(NamedTuple):
    """One request: when it was sent, when each of its tokens came, and the tokens."""

    sent: float
    times: list[float]
    tokens: list[int]


class Session(NamedTuple):
    """All requests in their order, and the seconds of processor time from the first one on."""

    answers: list[Answer]
    processor_seconds: float


Server = Callable[[Sequence[list[int]], int], Session]


class Clock(BaseStreamer):
    """Notes when `generate` makes each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Is called with the prompt `[1, T]` first, and then with each token `[1]`."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Is called at the end of an answer."""


def make_servers(options: argparse.Namespace) -> dict[str, Server]:
    """Both ways of serving, of a model with composed heads and of the same one without."""
    generation = GenerationConfig(max_new_tokens=options.new, do_sample=False, eos_token_id=None, pad_token_id=0)
    servers: dict[str, Server] = {}
    for prefix, composes in (("", True), ("plain ", False)):
        model = make_model(options, composes)
        servers[f"{prefix}{ALONE}"] = partial(serve_alone, model, generation)
        if options.engine == "vllm":
            servers[f"{prefix}vLLM"] = partial(serve_in_vllm, start_vllm(model, options), options.new)
        else:
            servers[f"{prefix}batching"] = partial(serve_together, model, generation)
    return servers


def make_model(options: argparse.Namespace, composes: bool) -> PreTrainedModel:
    """A DCFormer with random weights. Without composition it runs, in batches, with the same attention as with it."""
    torch.manual_seed(options.seed)
    hidden = options.heads * options.width
    config = DCFormerConfig(
        vocab_size=options.vocabulary,
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        max_position_embeddings=2048,
        compose_pre=composes,
        compose_post=composes,
        eos_token_id=None,
        bos_token_id=None,
    )
    config._attn_implementation = "chunked"
    return DCFormerForCausalLM(config).eval()


def random_prompts(options: argparse.Namespace, count: int) -> list[list[int]]:
    """Prompts of random lengths, without token 0, which `generate` would take for padding."""
    chooser = random.Random(options.seed)
    lengths = [chooser.randint(options.shortest, options.longest) for _ in range(count)]
    return [[chooser.randrange(1, options.vocabulary) for _ in range(length)] for length in lengths]


@torch.no_grad()
def serve_alone(
    model: PreTrainedModel, generation: GenerationConfig, prompts: Sequence[list[int]], clients: int
) -> Session:
    """Serves one request after the other by `generate`; the clients wait in a queue."""
    answers: list[Answer] = []
    start, processor_start = time.perf_counter(), time.process_time()
    for index, prompt in enumerate(prompts):
        clock = Clock()
        output = model.generate(torch.tensor([prompt]), generation_config=generation, streamer=clock)  # type: ignore[operator]
        sent = start if index < clients else answers[index - clients].times[-1]
        answers.append(Answer(sent, clock.times[1:], output[0, len(prompt) :].tolist()))
    return Session(answers, time.process_time() - processor_start)


def serve_together(
    model: PreTrainedModel, generation: GenerationConfig, prompts: Sequence[list[int]], clients: int
) -> Session:
    """Continuous batching of the requests of `clients` clients. No prompt profits from an earlier one."""
    settings = ContinuousBatchingConfig(allow_block_sharing=False, page_size=32, max_batch_tokens=2048)
    answers: dict[int, Answer] = {}
    places: dict[str, int] = {}
    waiting = list(enumerate(prompts))[::-1]
    with model.continuous_batching_context_manager(generation, continuous_batching_config=settings) as manager:  # type: ignore[operator]

        def send() -> None:
            index, prompt = waiting.pop()
            places[manager.add_request(prompt, request_id=f"request {index}", record_timestamps=True)] = index

        processor_start = time.process_time()
        for _ in range(min(clients, len(prompts))):
            send()
        while len(answers) < len(prompts):
            result = manager.get_result(timeout=60)
            if result is None or result.error:
                raise RuntimeError(f"the manager gave no answer: {result and result.error}")
            answers[places[result.request_id]] = Answer(result.created_time, result.timestamps, result.generated_tokens)
            if waiting:
                send()
        processor_seconds = time.process_time() - processor_start
    return Session([answers[index] for index in range(len(prompts))], processor_seconds)


def start_vllm(model: PreTrainedModel, options: argparse.Namespace) -> Any:
    """An engine of vLLM in this process, whose processor time is counted, with as many threads as all others."""
    for name, value in (("ENABLE_V1_MULTIPROCESSING", 0), ("CPU_KVCACHE_SPACE", 1), ("CPU_OMP_THREADS_BIND", "nobind")):
        os.environ.setdefault(f"VLLM_{name}", str(value))
    from vllm import LLM

    sizes = {"max_num_batched_tokens": 2048, "max_num_seqs": max(options.clients), "enable_prefix_caching": False}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm = LLM(folder, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, **sizes)
    torch.set_num_threads(options.threads)
    return llm.llm_engine


def serve_in_vllm(engine: Any, new: int, prompts: Sequence[list[int]], clients: int) -> Session:
    """The requests of `clients` clients in vLLM's engine. No prompt profits from an earlier one."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
    answers: dict[int, Answer] = {}
    sent: dict[int, float] = {}
    times: defaultdict[int, list[float]] = defaultdict(list)
    waiting = list(enumerate(prompts))[::-1]

    def send() -> None:
        index, prompt = waiting.pop()
        sent[index] = time.perf_counter()
        engine.add_request(str(index), {"prompt_token_ids": prompt}, greedy)

    processor_start = time.process_time()
    for _ in range(min(clients, len(prompts))):
        send()
    while engine.has_unfinished_requests():
        for output in engine.step():
            index = int(output.request_id)
            times[index].append(time.perf_counter())
            if output.finished:
                answers[index] = Answer(sent[index], times[index], list(output.outputs[0].token_ids))
                if waiting:
                    send()
    processor_seconds = time.process_time() - processor_start
    return Session([answers[index] for index in range(len(prompts))], processor_seconds)
