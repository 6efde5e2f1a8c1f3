"""The folder of a study: which study it belongs to, and the table and the plot that are made from its record."""

import json
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..common.atomic_file import partial_path, read_json, without_nan, write_json, write_whole
from ..common.disk_errors import disk_errors_explained
from ..common.environment import NOT_STORED, source_commit
from ..common.errors import UserError, refusal_of
from ..common.folder_lock import FolderLock
from ..common.folder_names import make_folder, resolve_folder

SETTINGS, RECORD, TABLE, LOCK = "study.json", "record.json", "table.md", ".lock"
# What messages call a setting that one of two studies does not have, and how many settings they name.
ABSENT, TOLD = "absent", 3


@contextmanager
def lock_of(output: Path) -> Iterator[None]:
    """Holds the lock of a study's folder in the block, in which runs are made.

    Raises:
        UserError: there can be no such folder, it cannot be written, or another process holds it.
    """
    resolve_folder(str(output))
    lock = FolderLock(output / LOCK)
    try:
        with disk_errors_explained(output):
            lock.take()
        yield
    finally:
        lock.release()


def claim(output: Path, settings: Mapping[str, Any], study: str) -> None:
    """Reserves the folder for a study with these settings. Once it has made something, they must stay the same.

    Raises:
        UserError: the folder holds a study with other settings, or something else; the message calls it a `study`.
    """
    resolve_folder(str(output))
    marker = output / SETTINGS
    # A process that was killed here, or another one that is here now, may have the marker half written.
    ignored = (marker, partial_path(marker), output / LOCK)
    made = [path for path in output.iterdir() if path not in ignored] if output.is_dir() else []
    if marker.exists() and made:
        stored = read_json(marker, "give another --output")
        given = json.loads(json.dumps(settings))
        if changed := [told for name in given for told in _differences(name, stored.get(name, ABSENT), given[name])]:
            rest = f" and {len(changed) - TOLD} more" if len(changed) > TOLD else ""
            raise UserError(
                f"{output} holds a study with other {', '.join(changed[:TOLD])}{rest}; give another --output"
            )
    elif made:
        raise UserError(f"{output} holds something that is no {study}; give a new or empty --output")
    make_folder(output)
    write_json(marker, settings, indent=1)


def _differences(name: str, stored: Any, given: Any) -> list[str]:
    """The settings below `name` that differ, each with both values."""
    if not (isinstance(stored, dict) and isinstance(given, dict)):
        return [] if stored == given else [f"{name} ({_short(stored)} there, {_short(given)} now)"]
    inner = [(key, stored.get(key, ABSENT), given.get(key, ABSENT)) for key in {**stored, **given}]
    return [told for key, *values in inner for told in _differences(f"{name}.{key}", *values)]


def _short(value: Any) -> str:
    return ABSENT if value == ABSENT else reprlib.repr(value)


def write_record(output: Path, record: Mapping[str, Any]) -> None:
    """Writes the record of a study, in which numbers of diverged runs are null."""
    write_json(output / RECORD, without_nan(record), indent=1)


def draw(
    output: Path,
    table: Callable[[Mapping[str, Any]], str],
    plot: Callable[[Mapping[str, Any], Path], None],
    plot_name: str,
) -> str:
    """Makes the table and the plot from the record alone; returns the table and the names of the files.

    A line tells if runs were made with another commit than this one.

    Raises:
        UserError: there is no record, or it is damaged or of another study.
    """
    try:
        record = read_json(output / RECORD, "remove it, and run the study without --redraw")
    except OSError as error:
        raise UserError(f"{output} holds no {RECORD}; run the study without --redraw first") from error
    try:
        text = table(record)
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration) as error:
        reason = f"is not of this study: {refusal_of(error)}"
        raise UserError(f"{output / RECORD} {reason}; give another --output") from error
    write_whole(output / TABLE, text + "\n")
    plot(record, output / plot_name)
    return f"\n{text}\n\n{other_commits(record)}{output}: {RECORD}, {TABLE}, {plot_name}"


def other_commits(record: Mapping[str, Any]) -> str:
    """A line that names the commits, other than the present one, that runs of the record were made with; else empty."""
    now = source_commit()
    others = [commit for commit in record.get("commit", []) if commit not in (now, None, NOT_STORED)]
    return f"runs were made with other code: commit {', '.join(others)}; this is {now}\n" if now and others else ""
