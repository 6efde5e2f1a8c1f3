"""Serving many clients at once: requests a second, the time to the first token, and the time between tokens.

    python -m dynattn.scripts.benchmark.serving_report FOLDER [--clients 1 4 16 64]

Each client sends a request, waits for its answer, and sends the next. Continuous batching stands beside `generate` for
one request after the other, each with composed heads and without. Writes `record.json` and `table.md` into a folder.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from dynattn import DCFormerConfig, DCFormerForCausalLM

from ..common.environment import hardware, versions
from .harness.process import source_commit

MODULE = "dynattn.scripts.benchmark.serving_report"
ALONE = "generate"
COLUMNS = ["clients", "server", "requests/s", "ratio", "ratio by processor time"]
COLUMNS += ["first token, ms", "p95", "between tokens, ms", "p95"]
HEADING = """`{command}`

Commit {commit}, torch {torch}, transformers {transformers}; {hardware}, {threads} threads; load average {load}.

{model}, float32, random weights. {requests} requests for each client (at least 4 in all), with prompts of {prompt}
tokens and {new} new ones; greedy. Medians of {rounds} interleaved rounds. Ratios are to `generate` with composed heads
in the same round: of requests a second, and of requests in a second of processor time, which does not depend on what
else the machine does. Time to the first token counts from when a client sends. Answers with the tokens of `generate`:
{same}.
"""


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


def main(argv: Sequence[str] | None = None) -> None:
    """Measures all servers with all numbers of clients, and writes the report."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where to write record.json and table.md")
    numbers = {"threads": 1, "rounds": 3, "requests": 2, "layers": 6, "heads": 8, "width": 64}
    numbers |= {"vocabulary": 8192, "shortest": 16, "longest": 256, "new": 64, "seed": 0}
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64], help="clients at once")
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"({default})")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    write_report(report(options), options.folder)


def report(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the record of all runs."""
    servers = make_servers(options)
    record: dict[str, Any] = {
        "command": f"python -m {MODULE} FOLDER " + " ".join(map(str, as_words(options))),
        "commit": source_commit(),
        "versions": versions(),
        "hardware": hardware(torch.device("cpu")),
        "options": {name: value for name, value in vars(options).items() if name != "folder"},
        "load_average": os.getloadavg(),
        "runs": [],
    }
    for clients in options.clients:
        prompts = random_prompts(options, max(4, options.requests * clients))
        for turn in range(options.rounds):
            truth: list[Answer] = []
            for name, serve in servers.items():
                answers, seconds = serve(prompts, clients)
                run = {"clients": clients, "round": turn, "server": name, "processor_seconds": seconds}
                truth = answers if name.endswith(ALONE) else truth
                same = sum(ours.tokens == theirs.tokens for ours, theirs in zip(answers, truth, strict=True))
                record["runs"].append({**run, "requests": len(prompts), "same": same, **summarize(answers)})
                print(json.dumps(record["runs"][-1]), flush=True)
    return record | {"load_average_after": os.getloadavg()}


def as_words(options: argparse.Namespace) -> list[Any]:
    """The options as they are typed."""
    words: list[Any] = []
    for name, value in vars(options).items():
        if name != "folder":
            words += [f"--{name}", *(value if isinstance(value, list) else [value])]
    return words


def make_servers(options: argparse.Namespace) -> dict[str, Server]:
    """Both ways of serving, of a model with composed heads and of the same one without."""
    generation = GenerationConfig(max_new_tokens=options.new, do_sample=False, eos_token_id=None, pad_token_id=0)
    servers: dict[str, Server] = {}
    for prefix, composes in (("", True), ("plain ", False)):
        model = make_model(options, composes)
        servers[f"{prefix}{ALONE}"] = partial(serve_alone, model, generation)
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
    """So many prompts of random lengths, without token 0, which `generate` would take for padding."""
    chooser = random.Random(options.seed)
    lengths = [chooser.randint(options.shortest, options.longest) for _ in range(count)]
    return [[chooser.randrange(1, options.vocabulary) for _ in range(length)] for length in lengths]


@torch.no_grad()
def serve_alone(
    model: PreTrainedModel, generation: GenerationConfig, prompts: Sequence[list[int]], clients: int
) -> Session:
    """One request after the other. So many clients wait in a line, each for its own."""
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
    """Continuous batching of the requests of so many clients. No prompt profits from an earlier one."""
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


def summarize(answers: Sequence[Answer]) -> dict[str, float]:
    """Requests a second, and medians and 95th percentiles of seconds, over all answers."""
    seconds = max(answer.times[-1] for answer in answers) - min(answer.sent for answer in answers)
    first = [answer.times[0] - answer.sent for answer in answers]
    between = [
        later - earlier for answer in answers for earlier, later in zip(answer.times, answer.times[1:], strict=False)
    ]
    return {
        "requests_per_second": len(answers) / seconds,
        "first_token": statistics.median(first),
        "first_token_p95": quantile(first),
        "between_tokens": statistics.median(between),
        "between_tokens_p95": quantile(between),
    }


def quantile(values: Sequence[float]) -> float:
    """The 95th percentile."""
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def write_report(record: dict[str, Any], folder: Path) -> None:
    """Writes `record.json` and `table.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "record.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "table.md").write_text(as_markdown(record), encoding="utf-8")


def as_markdown(record: dict[str, Any]) -> str:
    """Returns the table of a record, with a row for each number of clients and each server."""
    options = record["options"]
    runs = record["runs"]
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["clients"], run["server"]), []).append(run)
    heading = HEADING.format(
        command=record["command"],
        commit=record["commit"],
        hardware=record["hardware"],
        load=", ".join(f"{one:.1f}" for one in record["load_average"]),
        model=f"DCFormer of {options['layers']} layers, {options['heads']} heads of {options['width']}, "
        f"{options['vocabulary']} tokens",
        prompt=f"{options['shortest']} to {options['longest']}",
        same=f"{sum(run['same'] for run in runs)} of {sum(run['requests'] for run in runs)}",
        **{name: record["versions"][name] for name in ("torch", "transformers")},
        **{name: options[name] for name in ("threads", "requests", "new", "rounds")},
    )
    lines = [heading, f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for (clients, server), group in groups.items():
        pairs = list(zip(group, groups[clients, ALONE], strict=True))
        rates = [run["requests_per_second"] for run in group]
        ratios = [rate / alone["requests_per_second"] for rate, (_, alone) in zip(rates, pairs, strict=True)]
        by_processor = [alone["processor_seconds"] / run["processor_seconds"] for run, alone in pairs]
        cells = [
            f"{statistics.median(rates):.3g}",
            *(f"{statistics.median(one):.2f}" for one in (ratios, by_processor)),
        ]
        for name in ("first_token", "first_token_p95", "between_tokens", "between_tokens_p95"):
            cells.append(f"{statistics.median(run[name] for run in group) * 1e3:.3g}")
        lines.append(f"| {clients} | {server} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
