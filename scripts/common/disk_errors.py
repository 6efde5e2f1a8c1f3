"""Errors of reading and writing files, such as those of a full disk, as errors that a user understands."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UserError, first_line

# Parts of the messages by which errors of reading and writing are recognized that are no `OSError`: errors of libraries
# written in Rust, and errors of torch's writer, which do not say what the operating system answered.
RUST_ANSWER = "(os error "
TORCH_WRITER = ("iostream", "inline_container")


@contextmanager
def disk_errors_explained(output: Path) -> Iterator[None]:
    """Turns errors of reading or writing in the block, such as those of a full disk, into a `UserError`."""
    try:
        yield
    except (UserError, BrokenPipeError):  # the latter: who reads the output has gone, as `head` does
        raise
    except Exception as error:  # the tokenizers library raises a bare Exception
        reason = answer_of_the_disk(error)
        if reason is None:
            raise
        named = getattr(error, "filename", None)
        raise UserError(
            f"cannot read or write {named or f'the files of output={output}'}: {reason}; make room there or "
            "allow writing, or give another output folder"
        ) from error


def answer_of_the_disk(error: Exception) -> str | None:
    """Why reading or writing failed; None if the error is about something else."""
    if isinstance(error, OSError):
        return error.strerror or first_line(error)
    if RUST_ANSWER in str(error):
        return first_line(error)
    if any(part in str(error) for part in TORCH_WRITER):
        return "a file could not be written to its end"
    return None
