"""Runs work on one process or on all; an error in one of them then ends all processes in the same way."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from ..common.errors import UserError, first_line

Value = TypeVar("Value")

# Texts in errors of reading and writing that are not an `OSError`: those of libraries written in Rust, and those of
# torch's writer, which do not say what the operating system answered.
RUST_ANSWER = "(os error "
TORCH_WRITER = ("iostream", "inline_container")


def on_main(accelerator: Accelerator, output: Path, work: Callable[[], Value]) -> Value:
    """Runs `work` on the main process once all have arrived; its value or its `UserError` reaches every process.

    Args:
        output: the folder that the work may write.
    """
    accelerator.wait_for_everyone()
    outcome = [attempt(work, output) if accelerator.is_main_process else (None, None)]
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


@contextmanager
def disk_errors_explained(output: Path) -> Iterator[None]:
    """Turns errors of reading or writing in the block, such as those of a full disk, into a `UserError`."""
    try:
        yield
    except (UserError, BrokenPipeError):  # the latter: who reads the output has gone, as `head` does
        raise
    except Exception as error:  # the tokenizers library raises a bare Exception
        reason = _answer_of_the_disk(error)
        if reason is None:
            raise
        named = getattr(error, "filename", None)
        raise UserError(
            f"cannot read or write {named or f'the files of output={output}'}: {reason}; make room there or "
            "allow writing, or give another output folder"
        ) from error


def _answer_of_the_disk(error: Exception) -> str | None:
    """Why reading or writing failed; None if the error is about something else."""
    if isinstance(error, OSError):
        return error.strerror or first_line(error)
    if RUST_ANSWER in str(error):
        return first_line(error)
    if any(part in str(error) for part in TORCH_WRITER):
        return "a file could not be written to its end"
    return None
