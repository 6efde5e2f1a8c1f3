"""The tables of the study in Markdown, made from its record."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ...common import markdown
from .arguments import QUESTION
from .arms import ARMS, FULL, PLAIN, TWICE
from .record import Record


def table(record: Mapping[str, Any]) -> str:
    """The study in Markdown: a table for each task, and the answer to the question that was asked before the runs."""
    parts = [answer(record), heads_to_solve(record), *(_task_table(task) for task in record["tasks"]), _reading(record)]
    return "\n\n".join(part for part in parts if part)


def answer(record: Mapping[str, Any]) -> str:
    """Whether H composed heads solved what 2H plain heads did, task by task and over all of them."""
    lines = ["**Do H composed heads solve what 2H plain heads need?** Runs that solved each task, of all:", ""]
    head = ["task", *(ARMS[name].label for name in QUESTION), "DCMHA against plain, p", "against twice the heads, p"]
    rows = []
    for task in record["tasks"]:
        if all(name in task["arms"] for name in QUESTION):
            counts = [_count(task["arms"][name]) for name in QUESTION]
            pairs = [task["log_rank"][f"{FULL} against {other}"] for other in (PLAIN, TWICE)]
            rows.append([_name(task), *counts, *(_p(pair) for pair in pairs)])
    if not rows:
        return "No task has finished runs of all sides yet."
    return "\n".join([*lines, markdown.table(head, rows), "", _over_tasks(record["over_tasks"])])


def _over_tasks(tests: Mapping[str, Mapping[str, Any]]) -> str:
    """The two tests that count all tasks at once, in words."""
    found = [
        f"against {ARMS[other].label} "
        + ("nothing tells them apart" if test["p"] is None else f"p = {test['p']:.2g} ({test['deviation']:+.1f} runs)")
        for other, test in ((other, tests[f"{FULL} against {other}"]) for other in (PLAIN, TWICE))
    ]
    return f"Over all tasks (log-rank test stratified by task), DCMHA {', and '.join(found)}; + is more, or earlier."


def heads_to_solve(record: Mapping[str, Any]) -> str:
    """The smallest number of heads with which more than half of an arm's runs solved a task.

    Returns an empty text if the study ran only one number of heads.
    """
    counts = sorted({task["heads"] for task in record["tasks"]})
    if len(counts) < 2:
        return ""
    names = [name for name in ARMS if any(name in task["arms"] for task in record["tasks"])]
    places = dict.fromkeys((task["task"], task["layers"]) for task in record["tasks"])
    head = ["heads to solve", *(f"{task}, {layers} layers" for task, layers in places)]
    rows = [[ARMS[name].label, *(_fewest_heads(record, place, name) for place in places)] for name in names]
    return f"{markdown.table(head, rows)}\n\n{_reading_heads(record, counts)}"


def _fewest_heads(record: Mapping[str, Any], place: tuple[str, int], name: str) -> str:
    """The fewest heads that solve a task, and the H of the arm's runs if these are not all; empty without runs."""
    tasks = [task for task in record["tasks"] if (task["task"], task["layers"]) == place]
    run = [task for task in tasks if name in task["arms"]]
    if not run:
        return ""
    enough = [task["heads"] for task in run if _solves(task["arms"][name])]
    times, counts = ARMS[name].times_heads, [str(task["heads"]) for task in run]
    fewest = str(times * min(enough)) if enough else f"more than {times * max(task['heads'] for task in run)}"
    return fewest if len(run) == len(tasks) else f"{fewest} (H = {', '.join(counts)})"


def _reading_heads(record: Mapping[str, Any], counts: Sequence[int]) -> str:
    """What heads to solve are, and which attentions cannot have some of the numbers of heads."""
    refused: dict[tuple[int, str], list[str]] = {}
    for one in record["settings"].get("refused", ()):
        refused.setdefault((one["heads"], one["reason"]), []).append(ARMS[one["arm"]].label)
    reasons = [f" Not with H = {heads}: {', '.join(arms)} ({reason})." for (heads, reason), arms in refused.items()]
    return (
        f"Heads to solve: the fewest with which most runs solved the task, of H = {', '.join(map(str, counts))}, or of "
        f"those in brackets where an attention was not run with all.{''.join(reasons)}"
    )


def _solves(arm: Mapping[str, Any]) -> bool:
    return 2 * sum(at is not None for at in arm["solved_at"]) > len(arm["solved_at"])


def _task_table(task: Record) -> str:
    head = ["", "parameters", "solved", "sequences to solve, mean", "accuracy at the end, mean", "p against plain"]
    rows = []
    for name, arm in task["arms"].items():
        test = task["log_rank"].get(f"{name} against {PLAIN}")
        accuracy = f"{statistics.mean(arm['accuracy']):.3f}"
        sequences = f"{arm['mean_sequences']:,.0f}"
        cells = [f"{arm['parameters']:,}", _count(arm), sequences, accuracy, _p(test) if test else ""]
        rows.append([ARMS[name].label, *cells])
    return f"### {_name(task)}\n\n{markdown.table(head, rows)}"


def _reading(record: Mapping[str, Any]) -> str:
    settings = record["settings"]
    *others, last = (f"{rate:g}" for rate in settings["learning_rates"])
    rates = (
        f"the best of {', '.join(others)} and {last} for each task and arm on seed {settings['tuning_seed']}, which "
        "does not count"
        if others
        else f"{last} for all, not tuned"
    )
    return (
        f"A run has solved its task when it answers 99 of 100 held-out questions right. Runs end after "
        f"{settings['steps']:,} updates of {settings['batch']} fresh sequences; those that have not solved their task "
        f"by then count with all of these in the mean, which is then too low, and as censored in the log-rank tests. "
        f"p is two-sided: the share of all ways to deal the runs to the two sides that differ as much (for five runs "
        f"against five at least 2 of 252), corrected over tasks (Holm); alike: none was solved, or all at once. "
        f"Learning rates: {rates}."
    )


def _name(task: Record) -> str:
    return f"{task['task']}, {task['layers']} layers, H = {task['heads']}"


def _count(arm: Mapping[str, Any]) -> str:
    return f"{sum(at is not None for at in arm['solved_at'])} of {len(arm['solved_at'])}"


def _p(test: Mapping[str, Any]) -> str:
    return "alike" if test["p_holm"] is None else f"{test['p_holm']:.2g}"
