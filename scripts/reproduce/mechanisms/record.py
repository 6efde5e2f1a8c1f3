"""The record of the study: how many runs of each arm solved each task, after how many sequences, and log-rank tests."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ...common.environment import of_runs
from ...common.paired import add_holm
from .arms import ARMS, FULL, PLAIN, TWICE
from .log_rank import log_rank
from .plan import Place

Record = dict[str, Any]


def make_record(runs: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> Record:
    """Everything that the table and the plot are made from.

    Args:
        runs: the finished runs that count.
        settings: the settings of the study.
    """
    places = sorted({_place(run) for run in runs})
    tasks = [_task_record(place, [run for run in runs if _place(run) == place], settings) for place in places]
    return with_tests({"settings": dict(settings), **of_runs(runs), "tasks": tasks})


def with_tests(record: Mapping[str, Any]) -> Record:
    """A record with the log-rank tests of its arms, in the place of those that it may have already."""
    tasks = [{**task, "log_rank": _tests(task["arms"])} for task in record["tasks"]]
    _correct(tasks)
    over_tasks = {f"{FULL} against {other}": _over_tasks(tasks, other) for other in (PLAIN, TWICE)}
    return {**record, "tasks": tasks, "over_tasks": over_tasks}


def _task_record(place: Place, runs: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> Record:
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
    return {"task": place[0], "layers": place[1], "heads": place[2], "budget": budget, "arms": arms}


def _tests(arms: Mapping[str, Any]) -> Record:
    """The tests of one task: each arm against the baseline, and full composition against twice the heads."""
    pairs = [*((name, PLAIN) for name in arms if name != PLAIN), (FULL, TWICE)]
    return {
        f"{name} against {other}": log_rank([(arms[name]["solved_at"], arms[other]["solved_at"])])
        for name, other in pairs
        if {name, other} <= set(arms)
    }


def _over_tasks(tasks: Sequence[Record], other: str) -> dict[str, float | None]:
    """The test of full composition against another arm, stratified by task, layers and heads."""
    both = [task["arms"] for task in tasks if {FULL, other} <= set(task["arms"])]
    return log_rank([(arms[FULL]["solved_at"], arms[other]["solved_at"]) for arms in both])


def _correct(tasks: Sequence[Record]) -> None:
    """Adds p values that are corrected over all tasks, one family for each pair of arms."""
    for pair in dict.fromkeys(name for task in tasks for name in task["log_rank"]):
        add_holm([task["log_rank"][pair] for task in tasks if pair in task["log_rank"]])


def _place(run: Mapping[str, Any]) -> Place:
    return run["run"]["task"], run["run"]["layers"], run["run"]["heads"]
