"""Files that appear as a whole or not at all, whatever ends the process or the machine."""

import errno
import json
import os
from pathlib import Path
from typing import Any

from .errors import UserError, first_line

# Errors of `fsync` on file systems that cannot flush folders. They are ignored, as nothing more can be done there.
CANNOT_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


def partial_path(path: Path) -> Path:
    """The name beside `path` under which its content is written before it is renamed."""
    return path.with_name(f".{path.name}.partial")


def write_whole(path: Path, text: str) -> None:
    """Writes a file under another name and renames it, so that no reader ever sees half of it."""
    partial = partial_path(path)
    try:
        partial.unlink(missing_ok=True)  # a link that somebody has put there would be followed
        partial.write_text(text, encoding="utf-8")
        put_in_place(partial, path)
    except OSError:  # a full disk, or `path` is a folder
        partial.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any, *, indent: int | None = 2, **options: Any) -> None:
    """Writes `content` as a JSON file with `write_whole`; `options` are those of `json.dumps`."""
    write_whole(path, json.dumps(content, indent=indent, **options) + "\n")


def read_json(path: Path, fix: str) -> dict[str, Any]:
    """The object in a JSON file of ours.

    Args:
        fix: what the user can do about a damaged file, the end of the message.

    Raises:
        UserError: the file holds something else, as when a full disk or an interrupted copy cut it off.
        OSError: it cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or no UTF-8
        raise UserError(f"{path} is damaged: {first_line(error)}; {fix}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it holds no object; {fix}")
    return content


def read_json_if_whole(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file, or if it holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def without_nan(content: Any) -> Any:
    """What JSON keeps of `content`, with None in place of NaN and infinities, which JSON does not have.

    Python writes them all the same, but readers in other languages refuse such files.
    """
    return json.loads(json.dumps(content), parse_constant=lambda _: None)


def put_in_place(partial: Path, final: Path) -> None:
    """Renames a complete file or folder to `final` once its content is on disk.

    Whenever the machine fails, `final` is absent, has its earlier content, or has all of the new.
    """
    flush_tree(partial)
    partial.replace(final)
    flush(final.parent)


def flush_tree(path: Path) -> None:
    """Waits until a file, or a folder with all that lies in it, is on disk."""
    for inner in path.rglob("*") if path.is_dir() else ():
        if not inner.is_symlink():
            flush(inner)
    flush(path)


def flush(path: Path) -> None:
    """Waits until a file, or the list of names in a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in CANNOT_FLUSH:
            raise
    finally:
        os.close(descriptor)
