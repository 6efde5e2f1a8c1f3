"""Names of folders, and of models and revisions on the Hub, that a user gives: impossible ones are refused early."""

import errno
import os
import re
from contextlib import suppress
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from .errors import UserError, first_line

# Longest name of a folder to write, in bytes: file systems allow 255, and scratch folders beside it add to its name.
LONGEST_FOLDER_NAME = 220
# Characters that end a line or are no text in UTF-8, so that no report or model card can name the folder.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f\x85\u2028\u2029\ud800-\udfff]")
# What git allows as the name of a branch or tag; a name with `..` could leave the Hub's cache.
REVISION = re.compile(r"(?!.*\.\.)[^\x00-\x20\x7f~^:?*\[\\/.-][^\x00-\x20\x7f~^:?*\[\\]*")


def resolve_folder(name: str) -> Path:
    """Returns the absolute path of a folder, which need not exist, with links followed.

    Raises:
        UserError: the system can have no such folder, or does not allow to look at it.
    """
    if not name or UNPRINTABLE.search(name):
        raise UserError(f"{_short(name)} is no name of a folder (empty, or with unprintable characters); give another")
    try:
        return follow_links(Path(name))
    except OSError as error:
        raise UserError(f"{_short(name)} cannot be a folder: {error.strerror}; give another") from error


def follow_links(path: Path) -> Path:
    """Returns the absolute path with links followed; it need not exist.

    Raises:
        OSError: a name is too long, links go round in a circle, or a folder above must not be entered.
    """
    try:
        target = path.resolve()
    except RuntimeError as error:  # how Python before 3.13 tells a circle
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error
    with suppress(FileNotFoundError, NotADirectoryError):
        target.stat()
    return target


def resolve_destination(name: str) -> Path:
    """Returns the absolute path of a folder to write.

    Raises:
        UserError: it is no name of a folder, is too long, lies in a file, or the command runs in it.
    """
    folder = resolve_folder(name)
    if (length := len(os.fsencode(folder.name))) > LONGEST_FOLDER_NAME:
        raise UserError(
            f"the folder name {_short(folder.name)} has {length} bytes; give one of at most {LONGEST_FOLDER_NAME}"
        )
    if Path.cwd().is_relative_to(folder):
        raise UserError(f"{folder} holds the current folder, so it cannot be written as a whole; give another folder")
    above = next(parent for parent in folder.parents if parent.exists())
    if not above.is_dir():
        raise UserError(f"{above} is a file, so that no folder can be written in it; give another folder")
    return folder


def make_folder(folder: Path) -> None:
    """Makes a folder for the results of a job, and those above it; one that exists is kept.

    Raises:
        UserError: there can be no such folder.
    """
    resolve_folder(str(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {error.strerror}; give another --output") from error


def check_revision(revision: str | None) -> None:
    """Raises UserError where no branch, tag or commit can have such a name."""
    if revision is not None and not (REVISION.fullmatch(revision) and len(revision) <= LONGEST_FOLDER_NAME):
        raise UserError(f"revision {_short(revision)} is no branch, tag or commit; give one, such as main")


def may_be_on_the_hub(name: str) -> bool:
    """Whether the Hub can have a repository of that name, which may still be a relative path on this machine too."""
    if name.startswith((".", "/", "~")):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def absence(name: str, error: Exception) -> UserError:
    """The error for a name that is no folder, and that the Hub did not give; `error` says why."""
    return UserError(
        f"{name} is no folder here, and the Hub did not give it: {first_line(error)}; check the name and the network, "
        "or give the folder of a checkpoint"
    )


def _short(name: str) -> str:
    """A name in quotes, for messages; the middle of a long one is left out."""
    text = repr(name)
    return text if len(text) <= 80 else f"{text[:40]}...{text[-37:]}"
