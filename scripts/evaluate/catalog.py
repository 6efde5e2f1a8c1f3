"""Finds and loads lm-eval tasks: this package's, which need no download, and lm-eval's own."""

import difflib
import functools
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager

from ..common.errors import UserError, first_line
from ..common.offline import offline_if_unreachable
from .suites import SUITES, TASKS


class TaskCatalog:
    """The tasks, groups and tags that were asked for, known to exist but not loaded yet.

    Args:
        names: names as lm-eval knows them; a pattern such as "dynattn_*" stands for the tasks, not groups, that match.
        include_path: a folder with further task files.

    Raises:
        UserError: no task is named, a name is unknown, or `include_path` is not a folder.
    """

    def __init__(self, names: Sequence[str], include_path: str | Path | None = None) -> None:
        if include_path is not None and not Path(include_path).is_dir():
            raise UserError(f"include_path {include_path} is not a folder")
        folders = (TASKS,) if include_path is None else (TASKS, Path(include_path))
        self._manager = _task_manager(folders, include_defaults=False)
        self.is_local = all(self._manager.match_tasks([name]) for name in names)
        if not self.is_local:
            self._manager = _task_manager(folders, include_defaults=True)
        self.names = list(dict.fromkeys(match for name in names for match in self._match(name)))
        if not self.names:
            raise UserError("no task is named; give --tasks NAME ... or --suite " + "|".join(SUITES))

    def _match(self, name: str) -> list[str]:
        if matches := self._manager.match_tasks([name]):
            tasks = [match for match in matches if match in self._manager.all_subtasks]
            return matches if name in matches else tasks or matches
        near = difflib.get_close_matches(name, self._manager.all_tasks, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "`dynattn lm-eval ls tasks` lists all"
        raise UserError(f"there is no task {name!r}; {hint}")

    def load(self) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Loads every task, with its data.

        Returns:
            What could be loaded, as lm-eval takes it: "tasks" by name and "groups" by name, inner groups first, because
            lm-eval derives the fields of a group from those of its members. And for each other name the reason in one
            line.

        Raises:
            UserError: a task is asked for twice, under two names.
        """
        loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}}
        missing, origins = dict[str, str](), dict[str, str]()
        with nullcontext(True) if self.is_local else offline_if_unreachable() as reachable:
            for name in self.names:
                try:
                    found = self._manager.load([name])
                except Exception as error:  # a task that cannot be loaded, for any reason, must not stop the others
                    missing[name] = _reason(error, reachable)
                    continue
                if twice := next((task for task in found["tasks"] if task in origins), None):
                    both = f"by {origins[twice]!r} and by {name!r}"
                    raise UserError(f"task {twice!r} is asked for twice, {both}; drop one")
                origins |= dict.fromkeys(found["tasks"], name)
                loaded["tasks"] |= found["tasks"]
                loaded["groups"] |= dict(reversed(found["groups"].items()))
        return loaded, missing


@functools.cache  # reading lm-eval's own thousands of task files takes seconds
def _task_manager(folders: tuple[Path, ...], *, include_defaults: bool) -> TaskManager:
    return TaskManager(include_path=list(folders), include_defaults=include_defaults)


def _reason(error: Exception, reachable: bool) -> str:
    if not reachable and isinstance(error, OSError):
        return "the Hub cannot be reached and the local cache has no copy of the data"
    return first_line(error)
