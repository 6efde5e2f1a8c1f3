"""Folders that appear as a whole or not at all."""

import hashlib
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from .atomic_file import flush, flush_tree
from .checkpoint_files import WRITTEN_PATTERNS
from .errors import UserError

# Kinds of folders beside the destination. Their names end with the machine and the process that made them, as in
# `.NAME.partial-1f3a5b7c-123`.
STAGING, REPLACED = "partial", "replaced"
# A digest, because names of machines are too long for the name of a folder.
MACHINE = hashlib.blake2s(platform.node().encode(), digest_size=4).hexdigest()


@contextmanager
def staged_folder(destination: Path, check: Callable[[], None] | None = None) -> Iterator[Path]:
    """Yields a new folder beside `destination` that takes its place at the end, or vanishes if the block fails.

    A folder that is already there is replaced.

    Args:
        check: raises UserError if what is at `destination` must not be replaced. It is called at the end, because
            another process may have written something there since the caller looked.

    Raises:
        UserError: a file or folder cannot be written, in the block or here.
    """
    staging, replaced = (_sibling(destination, kind, f"{MACHINE}-{os.getpid()}") for kind in (STAGING, REPLACED))
    made = [folder for folder in destination.parents if not folder.exists()]  # innermost first
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        yield staging
        if check is not None:
            check()
        flush_tree(staging)  # which takes long, and so comes before the earlier folder is set aside
        if destination.exists():
            destination.replace(replaced)
        staging.replace(destination)
        flush(destination.parent)
    except OSError as error:
        raise UserError(f"cannot write {destination}: {error.strerror or error}") from error
    finally:
        if replaced.exists() and not destination.exists():
            replaced.replace(destination)
        for leftover in (staging, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
        with suppress(OSError):  # of folders that are not empty
            for folder in made:
                folder.rmdir()


def claim_destination(destination: Path, source: Path, overwrite: bool) -> Callable[[], None]:
    """Restores a destination that a killed process has left, and checks that it may be written.

    Args:
        source: the folder that is read, which must not overlap it.
        overwrite: whether a checkpoint that is there may be replaced.

    Returns:
        The check, which `staged_folder` repeats at its end.

    Raises:
        UserError: see `recover` and `check_destination`.
    """
    recover(destination)
    check_free = partial(check_destination, destination, source, overwrite)
    check_free()
    return check_free


def check_destination(destination: Path, source: Path, overwrite: bool) -> None:
    """Refuses a destination that overlaps the source, or whose content would be lost.

    Raises:
        UserError: one folder lies in the other, or the destination is a file, a folder with files and no permission to
            overwrite them, a folder with files that are not of a checkpoint, or a Git repository.
    """
    if destination == source or destination.is_relative_to(source) or source.is_relative_to(destination):
        raise UserError(f"{destination} and {source} overlap; give another folder to write")
    if not destination.exists():
        return
    if not destination.is_dir():
        raise UserError(f"{destination} is a file; give another folder to write")
    if any(destination.iterdir()):
        if not overwrite:
            raise UserError(f"{destination} exists; give another folder to write, or --overwrite")
        if not (destination / "config.json").is_file():
            raise UserError(f"{destination} holds no checkpoint, so it is not overwritten; remove it yourself")
        if (destination / ".git").exists():
            raise UserError(f"{destination} is a Git repository, whose history would be lost; give another folder")
        check_nothing_else(destination, WRITTEN_PATTERNS)


def check_nothing_else(folder: Path, patterns: Iterable[str]) -> None:
    """Raises UserError if a folder that is to be overwritten holds files that none of the glob `patterns` matches."""
    known = {path for pattern in patterns for path in folder.glob(pattern)}
    others = (path for path in folder.rglob("*") if not path.is_dir() and path not in known)
    if other := min(others, default=None):
        raise UserError(
            f"{folder} also holds {other.relative_to(folder)}, which would be lost; move it, or give another folder"
        )


def recover(destination: Path) -> None:
    """Deletes what killed processes left beside `destination`, and restores a folder that one of them had set aside.

    Raises:
        UserError: one of those processes still runs, or may still run on another machine.
    """
    for kind in (REPLACED, STAGING):
        for leftover, machine, process in _leftovers(destination, kind):
            is_only_copy = kind == REPLACED and not destination.exists()
            fix = f"rename {leftover} to {destination.name}" if is_only_copy else f"remove {leftover}"
            if machine != MACHINE:
                raise UserError(
                    f"process {process} of another machine is writing {destination}, or was stopped; wait for it, or "
                    f"{fix} if it does not run"
                )
            if _runs(process):
                raise UserError(f"process {process} is writing {destination}; wait for it, or {fix} if it is not")
            if is_only_copy:
                leftover.replace(destination)
            else:
                shutil.rmtree(leftover)


def _leftovers(destination: Path, kind: str) -> Iterator[tuple[Path, str, int]]:
    """The folders of one kind beside `destination`, each with the machine and the process that made it."""
    prefix = _sibling(destination, kind, "").name
    for path in list(destination.parent.iterdir()) if destination.parent.is_dir() else []:
        machine, _, process = path.name.removeprefix(prefix).partition("-")
        if path.name.startswith(prefix) and process.isdigit() and path.is_dir() and not path.is_symlink():
            yield path, machine, int(process)


def _sibling(destination: Path, kind: str, maker: str) -> Path:
    return destination.with_name(f".{destination.name}.{kind}-{maker}")


def _runs(process: int) -> bool:
    """Whether another process of that number exists."""
    if process == os.getpid():
        return False
    try:
        with suppress(PermissionError):  # of another user's process
            os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    return True
