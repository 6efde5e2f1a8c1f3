"""Finds the local files that the user names by a path, a folder or a glob pattern."""

import logging
import os
from functools import cache
from itertools import takewhile
from pathlib import Path

from ...common.errors import UserError
from ..outputs.run_folder import RunFolder
from .indexed_names import DATA

logger = logging.getLogger(__name__)

# File suffixes, and the name of the loader in `datasets` that reads such files.
LOADERS = {".txt": "text", ".jsonl": "json", ".parquet": "parquet"}
# Parts of the names of files that look like data, among them those of compressed files, such as `.jsonl.gz`.
DATA_PARTS = {*LOADERS, ".json", ".csv", ".tsv", ".arrow"}


def find_files(source: str) -> list[Path] | None:
    """Returns the files that a path, folder or glob names, or None when `source` can only be a Hub name.

    The part of the path that exists is taken literally, even with `*`, `?` or `[` in it; only the rest is a pattern.
    """
    path = Path(source)
    folder, pattern = split_pattern(path)
    if path.is_dir():
        found = [file for file in files_below(path, "**/*") if file.suffix in LOADERS]
    elif path.is_file():
        found = [path]
    elif Path(named := source + DATA).is_file():
        raise UserError(f"{source} is the beginning of the names of Megatron's files; give {named}")
    elif any(character in pattern for character in "*?["):
        found = files_below(folder, pattern)
    elif path.suffix in LOADERS or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise UserError(f"there is no file or folder {source}; give builtin, a path, or a Hub dataset name")
    else:
        return None
    if not found:
        raise UserError(f"{source} holds no file that ends in {', '.join(LOADERS)}")
    if unknown := [file.name for file in found if file.suffix not in LOADERS]:
        raise UserError(f"{unknown[0]} ends in none of {', '.join(LOADERS)}; convert it to one of them")
    return found


def split_pattern(path: Path) -> tuple[Path, str]:
    """The longest leading part of a path that exists, and the rest."""
    folder, parts = Path(path.anchor), path.relative_to(path.anchor).parts
    for index, part in enumerate(parts):
        if not os.path.lexists(folder / part):
            return folder, str(Path(*parts[index:]))
        folder /= part
    return folder, ""


def files_below(folder: Path, pattern: str) -> list[Path]:
    """The files below a folder that match a pattern, without those in the output folders of runs."""

    @cache
    def is_of_run(inner: Path) -> bool:
        return RunFolder(inner).is_marked

    found = sorted(file for file in folder.glob(pattern) if file.is_file())
    return [file for file in found if not any(map(is_of_run, takewhile(lambda path: path != folder, file.parents)))]


def warn_of_unread(source: str) -> None:
    """Warns of files in a folder that look like data and are of a kind that is not read."""
    below = files_below(Path(source), "**/*") if Path(source).is_dir() else []
    seen = [file for file in below if not any(part.startswith(".") for part in file.relative_to(source).parts)]
    kinds = {file: {suffix.lower() for suffix in file.suffixes} for file in seen if file.suffix not in LOADERS}
    if unread := [file for file, suffixes in kinds.items() if suffixes & DATA_PARTS]:
        message = "%d files in %s end in none of %s and are not read, the first is %s; convert them if they are data"
        logger.warning(message, len(unread), source, ", ".join(LOADERS), unread[0].name)


def leave_out_empty(files: list[Path]) -> list[Path]:
    """The files that are not empty; a warning counts the empty ones.

    Raises:
        UserError: all are empty.
    """
    filled = [file for file in files if file.stat().st_size]
    if not filled:
        raise UserError(f"{', '.join(map(str, files))} is empty; give a file with text")
    if empty := sorted(set(files) - set(filled)):
        logger.warning("%d of %d files are empty and left out, the first is %s", len(empty), len(files), empty[0])
    return filled
