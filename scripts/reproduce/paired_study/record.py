"""The record of a study of arms, with its statistics, and the table that is made of it."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ...common import markdown
from ...common.environment import of_runs
from ...common.paired import add_holm, diverged, mean_in_words, p_in_words, paired_difference, spread, spread_in_words

Record = dict[str, Any]
# What a run says of its model.
COSTS = ("parameters", "flops", "cpu_seconds")
MINUS = "\N{MINUS SIGN}"


def make_record(
    description: Mapping[str, Any], settings: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> Record:
    """Everything that the table and the plot are made from.

    Args:
        description: the study's name, tasks, arms, contrasts and notes.
        settings: the settings of the study.
        results: the finished runs that count.
    """
    return {
        **description,
        "settings": dict(settings),
        **of_runs(results),
        "results": {
            task: _task_record(description, task, [result for result in results if result["run"]["task"] == task])
            for task in description["tasks"]
        },
    }


def _task_record(description: Mapping[str, Any], task: str, results: Sequence[Mapping[str, Any]]) -> Record:
    metrics = [metric["name"] for metric in description["tasks"][task]["metrics"]]
    arms = {name: [result for result in results if result["run"]["arm"] == name] for name in description["arms"]}
    arms = {name: runs for name, runs in arms.items() if runs}
    return {
        "arms": {name: _arm_record(runs, metrics) for name, runs in arms.items()},
        "differences": {metric: _differences(arms, description["contrasts"], metric) for metric in metrics},
    }


def _arm_record(runs: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> Record:
    return {
        "seeds": [run["run"]["seed"] for run in runs],
        "learning_rate": runs[0]["run"]["learning_rate"],
        **{name: statistics.mean(run[name] for run in runs) for name in COSTS},
        "metrics": {metric: spread([run["metrics"][metric] for run in runs]) for metric in metrics},
        "details": [run.get("details") for run in runs],
    }


def _differences(
    arms: Mapping[str, Sequence[Mapping[str, Any]]], contrasts: Sequence[Sequence[str]], metric: str
) -> list[Record]:
    """First minus second arm of each contrast on the seeds that both have; p corrected over the contrasts (Holm)."""
    rows: list[Record] = []
    for first, second in contrasts:
        values, others = (
            {run["run"]["seed"]: run["metrics"][metric] for run in arms.get(name, ())} for name in (first, second)
        )
        seeds = [seed for seed in values if seed in others]
        if seeds:
            test = paired_difference([values[seed] for seed in seeds], [others[seed] for seed in seeds])
            rows.append({"arm": first, "other": second, "seeds": seeds, **test})
    add_holm(rows)
    return rows


def table(record: Mapping[str, Any]) -> str:
    """The study in Markdown: for each task its arms and their differences, then notes."""
    parts = []
    for name, task in record["tasks"].items():
        if record["results"][name]["arms"]:
            parts += [f"### {task['label']}", _arms_table(record, name), _differences_table(record, name)]
    return "\n\n".join([*parts, _reading(record)])


def _arms_table(record: Mapping[str, Any], task: str) -> str:
    metrics = record["tasks"][task]["metrics"]
    head = ["", "parameters", "MFLOP", "seconds", "learning rate", *(metric["label"] for metric in metrics)]
    rows = []
    for name, arm in record["results"][task]["arms"].items():
        summaries = [(arm["metrics"][metric["name"]], f".{metric['digits']}f") for metric in metrics]
        numbers = [diverged(one, arm["seeds"]) or spread_in_words(one, form) for one, form in summaries]
        costs = [f"{arm['parameters']:,.0f}", f"{arm['flops'] / 1e6:.2f}", f"{arm['cpu_seconds']:.0f}"]
        rows.append([record["arms"][name], *costs, f"{arm['learning_rate']:g}", *numbers])
    return markdown.table(head, rows)


def _differences_table(record: Mapping[str, Any], task: str) -> str:
    metrics = record["tasks"][task]["metrics"]
    labels = record["arms"]
    head = ["difference", *(text for metric in metrics for text in (metric["label"], "p"))]
    rows = []
    columns = [record["results"][task]["differences"][metric["name"]] for metric in metrics]
    for tests in zip(*columns, strict=True):
        cells = [f"{labels[tests[0]['arm']]} {MINUS} {labels[tests[0]['other']]}"]
        for test, metric in zip(tests, metrics, strict=True):
            cells += _difference(test, metric["digits"])
        rows.append(cells)
    return markdown.table(head, rows)


def _difference(test: Mapping[str, Any], digits: int) -> list[str]:
    """Mean difference with its interval, and p; those of a single seed have neither, those of diverged runs nothing."""
    if told := diverged(test, test["seeds"]):
        return [told, ""]
    return [mean_in_words(test, f"+.{digits}f"), p_in_words(test["p_holm"])]


def _reading(record: Mapping[str, Any]) -> str:
    settings = record["settings"]
    grid = settings["learning_rates"]
    rates = ", ".join(f"{rate:g}" for rate in grid)
    chosen = [arm["learning_rate"] for task in record["results"].values() for arm in task["arms"].values()]
    at_end = sum(rate in (min(grid), max(grid)) for rate in chosen)
    tuned = (
        f"Learning rates: the best of {rates} for each arm on seed {settings['tuning_seed']}, which does not count; "
        f"{at_end} of {len(chosen)} choices are the smallest or the largest of them."
    )
    left = f" {settings['unfinished_runs']} runs are not finished." if settings["unfinished_runs"] else ""
    return (
        f"Mean ± standard deviation over {len(settings['seeds'])} seeds.{left} Differences are paired by seed, with a "
        "95 % t interval; p is two-sided and corrected over the differences of a column (Holm). MFLOP: of a forward "
        "pass of one example, without norms and activations. Seconds: of a processor, training and tests. "
        f"{tuned if len(grid) > 1 else f'Learning rate: {rates}, not tuned.'} {record['notes']}"
    )
