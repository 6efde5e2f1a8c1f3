"""The record of the study: what each cell reached, differences between composed and plain, and the table."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ...common import markdown
from ...common.environment import OF_A_RUN, of_runs
from ...common.paired import add_holm, interval_in_words, p_in_words, paired_difference, spread, spread_in_words

Record = dict[str, Any]

# What identifies a cell: the runs that differ in their seed alone.
CELL = ("task", "scheme", "composition")
GATE = 0.95
# Answers of one bit out of two are half right by chance, so that ranks of schemes would mean nothing.
UNRANKED = ("parity",)
# Means over untrained lengths up to twice the trained one, three seeds, from the records in the repository of
# arXiv 2305.19466 (McGill-NLP/length-generalization): a decoder of 110 M parameters. Its rotary arm rotates a
# quarter of each head.
QUOTED: dict[str, dict[str, float]] = {
    "copy-one": {"none": 0.986, "t5": 0.771, "alibi": 0.289, "rope-quarter": 0.0, "sinusoidal": 0.0},
    "copy-many": {"none": 0.305, "t5": 0.420, "alibi": 0.331, "rope-quarter": 0.011, "sinusoidal": 0.028},
    "reverse": {"none": 0.230, "t5": 0.242, "alibi": 0.171, "rope-quarter": 0.077, "sinusoidal": 0.023},
    "addition": {"none": 0.085, "t5": 0.072, "alibi": 0.077, "rope-quarter": 0.0, "sinusoidal": 0.004},
}


def trained_match(run: Mapping[str, Any]) -> float:
    """The mean exact match over the trained lengths."""
    return statistics.mean(run["exact_match"][: run["trained"]])


def longer_match(run: Mapping[str, Any]) -> float:
    """The mean exact match over untrained lengths up to twice the longest trained one, the paper's number."""
    return statistics.mean(run["exact_match"][run["trained"] : 2 * run["trained"]])


def falls_below_half(run: Mapping[str, Any]) -> int | None:
    """The first length at which less than half of the answers are right; None if there is none."""
    return next((length for length, share in enumerate(run["exact_match"], start=1) if share < 0.5), None)


def make_record(settings: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> Record:
    """Everything that the table and the plot are made from; runs of a cell are in the order of their seeds."""
    cells = []
    for key in dict.fromkeys(map(key_of, runs)):
        here = [run for run in runs if key_of(run) == key]
        cells.append({
            **dict(zip(CELL, key, strict=True)),
            "learning_rate": here[0]["learning_rate"],
            "parameters": here[0]["parameters"],
            "learned": sum(trained_match(run) >= GATE for run in here),
            "trained_lengths": spread([trained_match(run) for run in here]),
            "longer_lengths": spread([longer_match(run) for run in here]),
            "longer_lengths_of_learned": [longer_match(run) for run in here if trained_match(run) >= GATE],
            "below_half_at": [falls_below_half(run) for run in here],
        })  # fmt: skip
    return {
        **of_runs(runs),
        "settings": dict(settings),
        "gate": GATE,
        "quoted": QUOTED,
        "runs": [{name: value for name, value in run.items() if name not in (*OF_A_RUN, "definition")} for run in runs],
        "cells": cells,
        "composition": composition_differences(cells),
        "reciprocal_ranks": reciprocal_ranks(cells),
    }


def key_of(one: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of a cell, or of the one that a run belongs to."""
    return tuple(one[name] for name in CELL)


def composition_differences(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Composed minus plain on untrained lengths, paired by seed; p corrected by Holm over the schemes of a task."""
    values = {key_of(cell): cell["longer_lengths"]["values"] for cell in cells}
    pairs = [(task, scheme) for task, scheme, name in values if name == "off" and (task, scheme, "on") in values]
    differences = [
        {"task": task, "scheme": scheme, **paired_difference(values[task, scheme, "on"], values[task, scheme, "off"])}
        for task, scheme in pairs
    ]
    for task in dict.fromkeys(task for task, _ in pairs):
        add_holm([one for one in differences if one["task"] == task])
    return differences


def reciprocal_ranks(cells: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The mean reciprocal rank of each scheme over tasks, by untrained lengths; composed and plain each for itself.

    Equal schemes share the best of their ranks. Tasks of `UNRANKED` do not count.
    """
    ranks: dict[str, dict[str, list[float]]] = {}
    for composition in ("off", "on"):
        for task in dict.fromkeys(cell["task"] for cell in cells if cell["task"] not in UNRANKED):
            here = {
                cell["scheme"]: cell["longer_lengths"]["mean"]
                for cell in cells
                if (cell["task"], cell["composition"]) == (task, composition)
            }
            for scheme, value in here.items():
                better = sum(other > value for other in here.values())
                ranks.setdefault(composition, {}).setdefault(scheme, []).append(1 / (1 + better))
    return {name: {scheme: statistics.mean(of) for scheme, of in here.items()} for name, here in ranks.items()}


def table(record: Mapping[str, Any]) -> str:
    """The study in Markdown: a row for each cell, then the differences, and notes on reading them."""
    return "\n\n".join([_cells_table(record), _differences_table(record), _reading(record)])


def _cells_table(record: Mapping[str, Any]) -> str:
    head = ["task", "scheme", "composed", "learned", "trained lengths", "longer, to 2 x", "of the learned"]
    head += ["below half at", "quoted"]
    rows = []
    for cell in record["cells"]:
        quoted = record["quoted"].get(cell["task"], {}).get(cell["scheme"])
        count, learned = len(cell["below_half_at"]), cell["longer_lengths_of_learned"]
        rows.append([
            cell["task"], cell["scheme"], cell["composition"], f"{cell['learned']} of {count}",
            spread_in_words(cell["trained_lengths"], ".3f"), spread_in_words(cell["longer_lengths"], ".3f"),
            spread_in_words(spread(learned), ".3f") if learned else "",
            ", ".join("-" if length is None else str(length) for length in cell["below_half_at"]),
            "" if quoted is None or cell["composition"] != "off" else f"{quoted:.3f}",
        ])  # fmt: skip
    return markdown.table(head, rows)


def _differences_table(record: Mapping[str, Any]) -> str:
    head = ["task", "scheme", "composed - plain, longer", "95 % interval", "p (Holm)"]
    rows = []
    for row in record["composition"]:
        words = interval_in_words(row, "+.3f"), p_in_words(row["p_holm"])
        rows.append([row["task"], row["scheme"], f"{row['mean']:+.3f}", *words])
    return markdown.table(head, rows)


def _reading(record: Mapping[str, Any]) -> str:
    settings = record["settings"]
    ranks = "; ".join(
        f"{'composed' if name == 'on' else 'plain'} "
        + ", ".join(f"{scheme} {rank:.3f}" for scheme, rank in here.items())
        for name, here in record["reciprocal_ranks"].items()
    )
    return (
        f"Exact match of whole answers, mean ± standard deviation over {len(settings['seeds'])} seeds (initial weights "
        f"and examples), {settings['steps']:,} updates, {settings['layers']} layers. Learned: runs with at least "
        f"{record['gate']:.0%} of the answers of trained lengths right; all runs count in the other columns, but for "
        "the one of the learned. Longer: mean over untrained lengths up to twice the longest trained one. Below half "
        "at: the first such length of each seed. Quoted: what arXiv 2305.19466 reports there of a model of 110 M "
        "parameters. Differences are paired by seed, with a t interval, p corrected over the schemes of a task."
        + (f" Mean reciprocal ranks over tasks: {ranks}." if ranks else "")
    )
