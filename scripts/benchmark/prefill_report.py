"""Time to the first token of prompts of very different lengths: padded on the left, and packed by `prepack`.

    python -m dynattn.scripts.benchmark.prefill_report FOLDER [--rounds 7] [--longest 1024] [--prompts 16]

The lengths of the prompts are drawn log-uniformly from 8 to the longest. Every round measures all ways in turn, and
ratios are taken within a round. Writes `record.json` and `table.md`.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from dynattn import prepack

from ..common.markdown import table
from .generate_report import LEAST, VOCABULARY, make_models, report, timing_cells

SHORTEST = 8
HEADING = """`{command}`

Commit {commit}; {hardware}, {threads} threads; load average {load}.

{layers} layers, {heads} heads of {width}, float32, random weights; {prompts} prompts of 8 to {longest} tokens,
{tokens} in all, which padding makes {padded}. Milliseconds to the first token of all: the median of {rounds} rounds,
and the least.

"""
COLUMNS = ("model", "prompts", "median ms", "minimum ms", "ratio to padded, median of rounds", "least and largest")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and writes the record and the table."""
    defaults = {"rounds": 7, "longest": 1024, "prompts": 16, "layers": 6, "heads": 16, "width": 64, "threads": 1}
    report(argv, __doc__, "prefill_report", defaults, measure, format_table, {**LEAST, "longest": SHORTEST})
    return 0


def draw_lengths(prompts: int, longest: int) -> list[int]:
    """The lengths of the prompts, of which the first is the longest."""
    shares = torch.rand(prompts - 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [longest, *(SHORTEST * (longest / SHORTEST) ** shares).long().tolist()]


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of each model and way in each round, after a round that is not counted and compares the tokens."""
    models = make_models(options, options.longest + 1)
    del models["Llama"]  # with a cache it does not keep packed prompts apart
    random = torch.Generator().manual_seed(2)
    lengths = draw_lengths(options.prompts, options.longest)
    prompts = [torch.randint(1, VOCABULARY, (length,), generator=random) for length in lengths]
    samples: dict[str, list[float]] = {}
    for _ in range(1 + options.rounds):
        for name, model in models.items():
            answers = []
            for way, inputs in (("padded", pad_left), ("packed", prepack)):
                started = time.perf_counter()
                answers.append(first_tokens(model, inputs(model, prompts)))
                elapsed = 1000 * (time.perf_counter() - started)
                samples.setdefault(f"{name}, {way}", []).append(elapsed)
            if not torch.equal(*answers):
                raise RuntimeError(f"{name} does not go on from packed prompts as from padded ones")
    return {name: values[1:] for name, values in samples.items()}


def pad_left(model: PreTrainedModel, prompts: Sequence[Tensor]) -> dict[str, Any]:
    """The prompts, each `[T]`, as `input_ids` and `attention_mask` with padding on the left."""
    inputs = {"input_ids": [*prompts], "attention_mask": [torch.ones_like(prompt) for prompt in prompts]}
    return {name: pad_sequence(rows, batch_first=True, padding_side="left") for name, rows in inputs.items()}


def first_tokens(model: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
    """The first token of each answer, `[B]`."""
    output = model.generate(**inputs, max_new_tokens=1, do_sample=False, pad_token_id=0)  # type: ignore[operator]
    return output[:, -1]


def format_table(record: dict[str, Any]) -> str:
    """The record in Markdown."""
    lengths = draw_lengths(record["prompts"], record["longest"])
    load = ", ".join(f"{value:.1f}" for value in record["load"])
    heading = HEADING.format(**{**record, "load": load}, tokens=sum(lengths), padded=len(lengths) * record["longest"])
    rows = []
    for name, samples in record["milliseconds"].items():
        model, way = name.rsplit(", ", 1)
        padded = record["milliseconds"][f"{model}, padded"]
        rows.append([model, way, *timing_cells(samples, padded, 0)])
    return heading + table(COLUMNS, rows) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
