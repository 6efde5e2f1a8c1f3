"""Runs work on one process or on all; an error in one of them then ends all processes in the same way."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from ..common.disk_errors import disk_errors_explained
from ..common.errors import UserError

Value = TypeVar("Value")


def on_main(output: Path, work: Callable[[], Value]) -> Value:
    """Runs `work`, which may write `output`, on the main process once all have arrived.

    Its value or its `UserError` reaches every process.
    """
    processes = PartialState()
    processes.wait_for_everyone()
    outcome = [attempt(work, output) if processes.is_main_process else (None, None)]
    broadcast_object_list(outcome)
    value, mistake = outcome[0]
    if mistake is not None:
        raise mistake
    return value  # type: ignore[return-value]


def on_all(output: Path, work: Callable[[], Value]) -> Value:
    """Runs `work`, which may write `output`, on every process; if some raise `UserError`, all raise the first of them.

    `work` must not wait for other processes after a step that can fail.
    """
    value, mistake = attempt(work, output)
    mistakes = [other for other in gather_object([mistake]) if other is not None]
    if mistakes:
        raise mistakes[0]
    return value  # type: ignore[return-value]


def attempt(work: Callable[[], Value], output: Path) -> tuple[Value | None, UserError | None]:
    """The value of `work()` and None, or None and the `UserError` that it raised."""
    try:
        with disk_errors_explained(output):
            return work(), None
    except UserError as error:
        return None, error
