"""The record of the study: how many runs of each arm solved each task, after how many sequences, and log-rank tests."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scipy import stats

from ...common.paired import holm
from .arms import ARMS, QUESTION

Record = dict[str, Any]
Cell = tuple[str, int]


def make_record(runs: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> Record:
    """Everything that the table and the plot are made from.

    Args:
        runs: the finished runs that count.
        settings: the settings of the study.
    """
    cells = sorted({(run["run"]["task"], run["run"]["layers"]) for run in runs})
    tasks = [_task_record(cell, [run for run in runs if _cell(run) == cell], settings) for cell in cells]
    _correct(tasks)
    return {
        "settings": dict(settings),
        "hardware": _distinct(runs, "hardware"),
        "versions": _distinct(runs, "versions"),
        "tasks": tasks,
    }


def _task_record(cell: Cell, runs: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> Record:
    budget = settings["steps"] * settings["batch"]
    arms = {}
    for name in ARMS:
        mine = [run for run in runs if run["run"]["arm"] == name]
        if mine:
            arms[name] = {
                "parameters": mine[0]["parameters"],
                "seeds": [run["run"]["seed"] for run in mine],
                "solved_at": [run["solved_at"] for run in mine],
                "accuracy": [run["accuracy"] for run in mine],
                "mean_sequences": statistics.mean(run["solved_at"] or budget for run in mine),
            }
    pairs = {
        f"{name} against {baseline}": log_rank(arms[name]["solved_at"], arms[baseline]["solved_at"], budget)
        for baseline in QUESTION[:2]
        for name in arms
        if baseline in arms and name != baseline and (baseline == QUESTION[0] or name == QUESTION[2])
    }
    return {"task": cell[0], "layers": cell[1], "budget": budget, "arms": arms, "log_rank": pairs}


def log_rank(solved: Sequence[int | None], others: Sequence[int | None], budget: int) -> dict[str, float | None]:
    """The two-sided log-rank test of two groups of runs; runs that did not solve their task are censored at `budget`.

    Without a run that solved it in either group there is nothing to test, and p is None.
    """
    if not any(at is not None for at in (*solved, *others)):
        return {"p": None}
    samples = [
        stats.CensoredData.right_censored([at or budget for at in group], [at is None for at in group])
        for group in (solved, others)
    ]
    return {"p": float(stats.logrank(*samples).pvalue)}


def _correct(tasks: Sequence[Record]) -> None:
    """Adds p values that are corrected over all tasks, one family for each pair of arms."""
    for pair in dict.fromkeys(name for task in tasks for name in task["log_rank"]):
        tests = [task["log_rank"][pair] for task in tasks if pair in task["log_rank"]]
        for test, p in zip(tests, holm([test["p"] for test in tests]), strict=True):
            test["p_holm"] = p


def table(record: Mapping[str, Any]) -> str:
    """The study in Markdown: a table for each task, and the answer to the question that was asked before the runs."""
    return "\n\n".join([answer(record), *(_task_table(task) for task in record["tasks"]), _reading(record)])


def answer(record: Mapping[str, Any]) -> str:
    """Whether H composed heads solved what 2H plain heads did, counted over tasks."""
    lines = ["**Do H composed heads solve what 2H plain heads need?** Runs that solved each task, of all:", ""]
    rows = [["task", *(ARMS[name].label for name in QUESTION), "DCMHA against plain, p", "against twice the heads, p"]]
    rows.append(["---"] * len(rows[0]))
    for task in record["tasks"]:
        if all(name in task["arms"] for name in QUESTION):
            counts = [_count(task["arms"][name]) for name in QUESTION]
            pairs = [task["log_rank"][f"full against {name}"] for name in QUESTION[:2]]
            rows.append([_name(task), *counts, *(_p(pair) for pair in pairs)])
    return "\n".join([*lines, _markdown(rows)]) if rows[2:] else "No task has finished runs of all sides yet."


def _task_table(task: Record) -> str:
    head = ["", "parameters", "solved", "sequences to solve, mean", "accuracy at the end, mean", "p against plain"]
    rows = [head, ["---"] * len(head)]
    for name, arm in task["arms"].items():
        test = task["log_rank"].get(f"{name} against plain")
        accuracy = f"{statistics.mean(arm['accuracy']):.3f}"
        sequences = f"{arm['mean_sequences']:,.0f}"
        cells = [f"{arm['parameters']:,}", _count(arm), sequences, accuracy, _p(test) if test else ""]
        rows.append([ARMS[name].label, *cells])
    return f"### {_name(task)}\n\n{_markdown(rows)}"


def _reading(record: Mapping[str, Any]) -> str:
    settings = record["settings"]
    rates = ", ".join(f"{rate:g}" for rate in settings["learning_rates"])
    return (
        f"A run has solved its task when it answers 99 of 100 held-out questions right. Runs end after "
        f"{settings['steps']:,} updates of {settings['batch']} fresh sequences; those that have not solved their task "
        f"by then count with all of these in the mean, which is then too low, and as censored in the log-rank tests. "
        f"p is two-sided and corrected over tasks (Holm). Learning rates: the best of {rates} for each task and arm on "
        f"seed {settings['tuning_seed']}, which does not count."
    )


def _name(task: Record) -> str:
    return f"{task['task']}, {task['layers']} layers"


def _count(arm: Mapping[str, Any]) -> str:
    return f"{sum(at is not None for at in arm['solved_at'])} of {len(arm['solved_at'])}"


def _p(test: Mapping[str, Any]) -> str:
    return "none solved" if test["p_holm"] is None else f"{test['p_holm']:.2g}"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(run: Mapping[str, Any]) -> Cell:
    return run["run"]["task"], run["run"]["layers"]


def _distinct(runs: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return [run[name] for index, run in enumerate(runs) if run[name] not in [one[name] for one in runs[:index]]]
