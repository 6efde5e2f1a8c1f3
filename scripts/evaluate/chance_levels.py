"""The chance levels of tasks with choices: the accuracy of guessing."""

from collections.abc import Mapping
from itertools import islice
from statistics import fmean
from typing import Any

from lm_eval.api.group import Group
from lm_eval.api.task import Task


def chances_of(loaded: Mapping[str, Mapping[str, Any]], limit: int | None) -> dict[str, float]:
    """The chance level of each task or group whose file has it, by name, for the documents that are scored.

    A file has that of all documents. The first ones may have more choices or fewer, and another share in a group.
    """
    named = [(name, task, task.config.metadata) for name, task in loaded["tasks"].items()]
    named += [(name, group, group.metadata) for name, group in loaded["groups"].items()]
    told = {name: (one, fields["chance"]) for name, one, fields in named if fields and "chance" in fields}
    if limit is None:
        return {name: chance for name, (_, chance) in told.items()}
    return {name: _chance_of_first(one, chance, limit) for name, (one, chance) in told.items()}


def _chance_of_first(one: Task | Group, chance: float, limit: int) -> float:
    """The chance level of a task's first `limit` documents, or of those of a group's tasks; `chance` is that of all."""
    tasks = one.get_all_tasks() if isinstance(one, Group) else [one]
    if any(task.OUTPUT_TYPE != "multiple_choice" for task in tasks):
        return chance
    documents = [(task, document) for task in tasks for document in islice(task.eval_docs, limit)]
    return round(fmean(1 / len(task.doc_to_choice(document)) for task, document in documents), 4)
