"""The record of the upcycling study, the statistics of its runs, and the table."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from scipy import stats

from ...pretrain.data.token_stream import TokenStream
from ...pretrain.outputs.metrics import read_metrics

Run = dict[str, Any]
Record = dict[str, Any]

BASELINE = "plain"
MEASURED = ("parameters", "steps", "tokens", "tokens_per_second", "train_seconds", "wall_seconds")
OPTIONS = ("seed", "learning_rate", "composition_learning_rate", "freeze_parent_steps", "warmup_steps")


def read_run(folder: Path) -> Run:
    """A finished run: its options, its measurements, and its losses by tokens."""
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    lines = read_metrics(folder / "metrics.jsonl")
    held_out = TokenStream.open(folder / "data" / "validation")
    return {
        **{name: result["arguments"][name] for name in OPTIONS},
        **{name: result[name] for name in MEASURED},
        **{name: result[name] for name in ("dataset", "hardware", "versions")},
        "validation_targets": len(held_out.tokens) - len(held_out.starts),
        "validation": _curve(lines, "validation", ("tokens", "loss", "bits_per_byte")),
        "train": _curve(lines, "train", ("tokens", "loss")),
    }


def make_record(
    settings: Mapping[str, Any], parents: Sequence[Run], arms: Mapping[str, Sequence[Run]], labels: Mapping[str, str]
) -> Record:
    """Everything that the table and the plot are made from.

    Args:
        settings: the settings of the study.
        parents: one run for each seed.
        arms: by name, one run for each seed in the same order; the others are compared with `BASELINE`.
        labels: the names of the arms in table and plot.
    """
    runs = [*parents, *(run for runs in arms.values() for run in runs)]
    common = ("dataset", "hardware", "versions", "validation_targets")
    return {
        **{name: _distinct([run.pop(name) for run in runs]) for name in common},
        "threads": torch.get_num_threads(),
        "settings": dict(settings),
        "parents": list(parents),
        "arms": {name: {"label": labels[name], "runs": list(runs)} for name, runs in arms.items()},
        "comparison": {name: compare(arms[BASELINE], runs) for name, runs in arms.items() if name != BASELINE},
    }


def compare(baseline: Sequence[Run], runs: Sequence[Run]) -> dict[str, Any]:
    """The last validation losses of `runs` minus those of `baseline`, seed by seed, with a two-sided paired t-test."""
    losses, others = (final(run, "loss") for run in (runs, baseline))
    test = stats.ttest_rel(losses, others)
    interval = test.confidence_interval(0.95)
    differences = [loss - other for loss, other in zip(losses, others, strict=True)]
    return {
        "differences": differences,
        "mean": statistics.mean(differences),
        "sd": statistics.stdev(differences),
        "interval_95": [float(interval.low), float(interval.high)],
        "p": float(test.pvalue),
    }


def final(runs: Sequence[Run], name: str) -> list[float]:
    """The last validation measurement `name` of each run."""
    return [run["validation"][-1][name] for run in runs]


def table(record: Record) -> str:
    """The study in Markdown: a row for the parents, a row for each arm, and notes on reading them."""
    head = ["", "parameters", "validation loss", "bits per byte", "difference", "95 % interval", "p", "tokens/s"]
    rows = [head, ["---"] * len(head), [*_row("parent, before", record["parents"]), "", "", "", ""]]
    for name, arm in record["arms"].items():
        speed = statistics.median(run["tokens_per_second"] for run in arm["runs"])
        difference = _difference(record["comparison"].get(name))
        rows.append([*_row(arm["label"], arm["runs"]), *difference, f"{speed:,.0f}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + f"\n\n{_reading(record)}"


def _row(label: str, runs: Sequence[Run]) -> list[str]:
    cells = [
        f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"
        for values in (final(runs, name) for name in ("loss", "bits_per_byte"))
    ]
    return [label, f"{runs[0]['parameters']:,}", *cells]


def _difference(comparison: Mapping[str, Any] | None) -> list[str]:
    if comparison is None:
        return ["", "", ""]
    low, high = comparison["interval_95"]
    return [f"{comparison['mean']:+.4f}", f"{low:+.4f} to {high:+.4f}", f"{comparison['p']:.2g}"]


def _reading(record: Record) -> str:
    arms = record["arms"]
    seeds = [run["seed"] for run in record["parents"]]
    targets = " or ".join(f"{number:,}" for number in record["validation_targets"])
    rates = "; ".join(f"{arm['label']} {arm['runs'][0]['learning_rate']:g}" for arm in arms.values())
    grid, tuning_seed = record["settings"]["learning_rates"], record["settings"]["tuning_seed"]
    choice = f"chosen on seed {tuning_seed} from {', '.join(f'{rate:g}' for rate in grid)}" if grid[1:] else "not tuned"
    return (
        f"Mean ± standard deviation over {len(seeds)} seeds (initial weights and order of the data); "
        f"{record['parents'][0]['tokens']:,} tokens for each parent, then {arms[BASELINE]['runs'][0]['tokens']:,} for "
        f"each row below it; loss in nats per token on {targets} held-out tokens. Difference: paired by seed, from "
        f"{arms[BASELINE]['label']}; p of a two-sided paired t-test, not corrected for {len(record['comparison'])} "
        f"comparisons. Learning rates ({choice}): {rates}. Tokens are equal; parameters and computation are not."
    )


def _curve(lines: Sequence[Run], split: str, names: Sequence[str]) -> list[dict[str, float]]:
    return [{name: line[name] for name in names} for line in lines if line["split"] == split]


def _distinct(values: Sequence[Any]) -> list[Any]:
    """Each value once; normally all runs share a single one."""
    return [value for index, value in enumerate(values) if value not in values[:index]]
