"""Time per token of plain `generate`, with its growing cache and nothing compiled, beside a Llama of the same sizes.

    python -m dynattn.scripts.benchmark.generate_report FOLDER [--rounds 9] [--context 1024]

Every round measures all models in turn, and ratios are taken within a round. Writes `record.json` and `table.md`.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from dynattn import DCFormerConfig, DCFormerForCausalLM
from dynattn.configuration.mixers import NO_COMPOSITION

from ..common.environment import hardware, source_commit, versions
from ..common.markdown import table
from ..common.measuring import interleave
from .report.record import write_report
from .serving_engines import Clock

VOCABULARY = 8192
HEADING = """`{command}`

Commit {commit}; {hardware}, {threads} threads; load average {load}.

{layers} layers, {heads} heads of {width}, float32, random weights, one request: {new} tokens after {context}, greedy.
Milliseconds between two tokens: the median of each answer, then of {rounds} rounds, and the least.

"""
# Two tokens of an answer have a time between them, two heads can be composed, and prompts of the serving report lack
# token 0. The least of all other numbers is 1.
LEAST = {"new": 2, "heads": 2, "vocabulary": 2, "seed": 0}
COLUMNS = ("model", "median ms", "minimum ms", "ratio to Llama, median of rounds", "least and largest")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and writes the record and the table."""
    defaults = {"rounds": 9, "context": 1024, "new": 40, "layers": 6, "heads": 16, "width": 64, "threads": 1}
    report(argv, __doc__, "generate_report", defaults, measure, format_table)
    return 0


def report(
    argv: Sequence[str] | None,
    about: str | None,
    module: str,
    defaults: Mapping[str, int],
    measure: Callable[[argparse.Namespace], dict[str, list[float]]],
    format_table: Callable[[dict[str, Any]], str],
    least: Mapping[str, int] = LEAST,
) -> None:
    """Measures with the options of a command line and writes `record.json` and `table.md` into its folder.

    Args:
        about: what `--help` says.
        module: of this folder, which the record names.
        defaults: of the options, all of which are whole numbers; `threads` is among them.
        measure: returns milliseconds of each round by what was measured.
        format_table: the record in Markdown.
        least: the least values of options for which it is not 1.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parse_numbers(parser, argv, defaults, least)
    torch.set_num_threads(options.threads)
    load = os.getloadavg()
    samples = measure(options)
    settings = {name: getattr(options, name) for name in defaults}
    record = {
        "command": command_of(f"dynattn.scripts.benchmark.{module}", settings),
        "commit": source_commit(),
        "hardware": hardware(torch.device("cpu")),
        "versions": versions(),
        "load": load,
        **settings,
        "milliseconds": samples,
    }
    write_report(record, format_table(record), options.folder)
    print(format_table(record))


def parse_numbers(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    defaults: Mapping[str, int],
    least: Mapping[str, int] = LEAST,
) -> argparse.Namespace:
    """Parses a command line with an option for each of `defaults`, and refuses numbers with nothing to measure."""
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"({default})")
    options = parser.parse_args(argv)
    for name in defaults:
        if (value := getattr(options, name)) < (limit := least.get(name, 1)):
            parser.error(f"--{name}={value} must be at least {limit}")
    return options


def command_of(module: str, settings: Mapping[str, Any]) -> str:
    """The command of a report as its record names it, with all options but the folder."""
    words = [f"python -m {module} FOLDER"]
    for name, value in settings.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return " ".join(words)


def make_models(options: argparse.Namespace, length: int) -> dict[str, PreTrainedModel]:
    """A Llama, the DCFormer that equals it without composition, and one with all dynamic terms, for `length` tokens."""
    hidden = options.heads * options.width
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 11 * hidden // 4,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "max_position_embeddings": length,
    }
    torch.manual_seed(0)
    return {
        "Llama": LlamaForCausalLM(LlamaConfig(**common)).eval(),
        "DCFormer without composition": DCFormerForCausalLM(DCFormerConfig(**common, **NO_COMPOSITION)).eval(),
        "DCFormer": DCFormerForCausalLM(DCFormerConfig(**common)).eval(),
    }


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds per token of each model in each round, after a round that is not counted."""
    models = make_models(options, options.context + options.new)
    prompt = torch.randint(VOCABULARY, (1, options.context), generator=torch.Generator().manual_seed(1))
    samplers = {name: partial(milliseconds_per_token, model, prompt, options.new) for name, model in models.items()}
    return {name: values[1:] for name, values in interleave(samplers, 1 + options.rounds).items()}


def milliseconds_per_token(model: PreTrainedModel, prompt: torch.Tensor, new: int) -> float:
    """The median time between two tokens of an answer to `prompt` `[1, T]`."""
    clock = Clock()
    lengths = {"max_new_tokens": new, "min_new_tokens": new}
    model.generate(  # type: ignore[operator]
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, streamer=clock, **lengths
    )
    tokens = clock.times[1:]  # the first time is the prompt's
    return 1000 * statistics.median(after - before for before, after in pairwise(tokens))


def format_table(record: dict[str, Any]) -> str:
    """The record in Markdown."""
    load = ", ".join(f"{value:.1f}" for value in record["load"])
    llama = record["milliseconds"]["Llama"]
    rows = [[name, *timing_cells(samples, llama, 2)] for name, samples in record["milliseconds"].items()]
    return HEADING.format(**{**record, "load": load}) + table(COLUMNS, rows) + "\n"


def timing_cells(samples: Sequence[float], baseline: Sequence[float], digits: int) -> list[str]:
    """Median and least milliseconds, then the median and the range of their ratios to `baseline` in the same round."""
    ratios = [ours / theirs for ours, theirs in zip(samples, baseline, strict=True)]
    times = [f"{time:.{digits}f}" for time in (statistics.median(samples), min(samples))]
    return [*times, f"{statistics.median(ratios):.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}"]


if __name__ == "__main__":
    raise SystemExit(main())
