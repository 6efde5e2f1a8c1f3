"""Serving many clients at once: requests a second, the time to the first token, and the time between tokens.

    python -m dynattn.scripts.benchmark.serving_report FOLDER [--clients 1 4 16 64] [--engine transformers|vllm]

Each client sends a request, waits for its answer, and sends the next. The report compares an engine's continuous
batching with `generate` for one request after the other, each with composed heads and without. It writes `record.json`
and `table.md` into a folder after every round; the same command continues an interrupted report.
"""

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ..common.atomic_file import read_json
from ..common.environment import hardware, source_commit, versions
from ..common.errors import UserError
from ..common.markdown import table
from .generate_report import command_of, parse_numbers
from .report.record import RECORD, write_report
from .serving_engines import ALONE, Answer, Server, make_servers, random_prompts

MODULE = "dynattn.scripts.benchmark.serving_report"
PACKAGES = ("torch", "transformers", "vllm")
COLUMNS = ["clients", "server", "requests/s", "ratio", "ratio by processor time"]
COLUMNS += ["first token, ms", "p95", "between tokens, ms", "p95"]
TIMES = ("first_token", "first_token_p95", "between_tokens", "between_tokens_p95")
HEADING = """`{command}`

Commit {commit}, {packages}; {hardware}, {threads} threads; load average {load}.

DCFormer of {layers} layers, {heads} heads of {width}, {vocabulary} tokens, float32, random weights. {requests} \
requests for each client (at least 4 in all), with prompts of {shortest} to {longest}
tokens and {new} new ones; greedy. Medians of {rounds} interleaved rounds. Ratios are to `generate` with composed heads
in the same round: of requests a second, and of requests in a second of processor time, which does not depend on what
else the machine does. Time to the first token counts from when a client sends. Answers with the tokens of `generate`:
{same}.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Measures all servers with all numbers of clients, and writes the report."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where to write record.json and table.md")
    numbers = {"threads": 1, "rounds": 3, "requests": 2, "layers": 6, "heads": 8, "width": 64}
    numbers |= {"vocabulary": 8192, "shortest": 16, "longest": 256, "new": 64, "seed": 0}
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64], help="clients at once")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers", help="what batches")
    options = parse_numbers(parser, argv, numbers)
    if (fewest := min(options.clients)) < 1:
        parser.error(f"--clients {fewest} must be at least 1")
    if options.shortest > options.longest:
        parser.error(f"--shortest={options.shortest} must be at most --longest={options.longest}")
    torch.set_num_threads(options.threads)
    try:
        record = started_record(options)
    except UserError as error:
        parser.error(str(error))
    servers = make_servers(options)
    for clients in options.clients:
        prompts = random_prompts(options, max(4, options.requests * clients))
        done = sum(run["clients"] == clients for run in record["runs"]) // len(servers)
        for turn in range(done, options.rounds):
            record["runs"] += run_round(servers, prompts, clients, turn)
            record["load_average_after"] = os.getloadavg()
            write_report(record, as_markdown(record), options.folder)


def started_record(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the record of the same command in the folder, with the rounds that it has, or a new one.

    Raises:
        UserError: the folder holds a damaged record, or that of another command, of other code, or of another machine.
    """
    settings = {name: value for name, value in vars(options).items() if name != "folder"}
    record: dict[str, Any] = {
        "command": command_of(MODULE, settings),
        "commit": source_commit(),
        "versions": versions(*["vllm"] * (options.engine == "vllm")),
        "hardware": hardware(torch.device("cpu")),
        "options": settings,
        "load_average": os.getloadavg(),
        "runs": [],
    }
    path = options.folder / RECORD
    if not path.exists():
        return record
    fix = "remove it, or give another folder"
    found = read_json(path, fix)
    for name in ("command", "commit", "versions", "hardware"):
        if found.get(name) != record[name]:
            raise UserError(f"{path} has the {name} {found.get(name)!r}, not {record[name]!r}; {fix}")
    return found


def run_round(
    servers: dict[str, Server], prompts: Sequence[list[int]], clients: int, turn: int
) -> list[dict[str, Any]]:
    """Returns a run of each server on the same prompts."""
    runs: list[dict[str, Any]] = []
    reference: list[Answer] = []
    for name, serve in servers.items():
        answers, seconds = serve(prompts, clients)
        reference = answers if name.endswith(ALONE) else reference
        same = sum(ours.tokens == theirs.tokens for ours, theirs in zip(answers, reference, strict=True))
        run = {"clients": clients, "round": turn, "server": name, "processor_seconds": seconds}
        runs.append({**run, "requests": len(prompts), "same": same, **summarize(answers)})
        print(json.dumps(runs[-1]), flush=True)
    return runs


def summarize(answers: Sequence[Answer]) -> dict[str, float]:
    """Requests a second, and medians and 95th percentiles of seconds, over all answers."""
    seconds = max(answer.times[-1] for answer in answers) - min(answer.sent for answer in answers)
    first = [answer.times[0] - answer.sent for answer in answers]
    between = [later - earlier for answer in answers for earlier, later in pairwise(answer.times)]
    return {
        "requests_per_second": len(answers) / seconds,
        "first_token": statistics.median(first),
        "first_token_p95": quantile(first),
        "between_tokens": statistics.median(between),
        "between_tokens_p95": quantile(between),
    }


def quantile(values: Sequence[float]) -> float:
    """The 95th percentile of the values."""
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def as_markdown(record: dict[str, Any]) -> str:
    """Returns the table of a record, with a row for each number of clients and each server."""
    options, runs = record["options"], record["runs"]
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["clients"], run["server"]), []).append(run)
    heading = HEADING.format(
        **{**record, **options},
        load=", ".join(f"{one:.1f}" for one in record["load_average"]),
        packages=", ".join(f"{name} {record['versions'][name]}" for name in PACKAGES if name in record["versions"]),
        same=f"{sum(run['same'] for run in runs)} of {sum(run['requests'] for run in runs)}",
    )
    rows = []
    for (clients, server), group in groups.items():
        pairs = list(zip(group, groups[clients, ALONE], strict=True))
        rates = [run["requests_per_second"] for run in group]
        ratios = [run["requests_per_second"] / alone["requests_per_second"] for run, alone in pairs]
        by_processor = [alone["processor_seconds"] / run["processor_seconds"] for run, alone in pairs]
        speeds = [f"{statistics.median(rates):.3g}"]
        speeds += [f"{statistics.median(one):.2f}" for one in (ratios, by_processor)]
        times = [f"{statistics.median(run[name] for run in group) * 1e3:.3g}" for name in TIMES]
        rows.append([str(clients), server, *speeds, *times])
    return f"{heading}\n{table(COLUMNS, rows)}\n"


if __name__ == "__main__":
    main()
