"""The files of a record: `record.json`, the table and the plots made from it."""

import json
from pathlib import Path
from shlex import join
from typing import Any

from ...common.atomic_file import write_json, write_whole
from ...common.errors import UserError, refusal_of
from ...common.folder_names import make_folder
from ..arguments import BenchmarkArguments
from .tables import format_record

RECORD, TABLE = "record.json", "table.md"


def redraw(arguments: BenchmarkArguments) -> None:
    """Writes an earlier record with its table and plots to another folder.

    Raises:
        UserError: the record cannot be read, or the output folder holds one already.
    """
    record = read_record(str(arguments.redraw))
    try:
        format_record(record)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{arguments.redraw} is not the {RECORD} of a benchmark: {refusal_of(error)}") from error
    folder = Path(arguments.output)
    make_output(folder, folder / RECORD, arguments)
    write_record(record, folder)


def make_output(folder: Path, record: Path, arguments: BenchmarkArguments) -> None:
    """Makes the output folder, in which `record` is the first file to be written.

    Raises:
        UserError: the record exists and neither --overwrite nor --resume is given, or the folder cannot be made.
    """
    if record.exists() and not (arguments.overwrite or arguments.resume):
        raise UserError(f"{record} exists; choose another --output, or pass --resume or --overwrite")
    make_folder(folder)


def read_record(path: str) -> dict[str, Any]:
    """An earlier run's record.

    Raises:
        UserError: the file cannot be read, or is no record.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the record {path}: {error}") from error
    if not isinstance(record, dict) or "cases" not in record:
        raise UserError(f"{path} is not the {RECORD} of a benchmark")
    return record


def read_earlier(folder: Path, metadata: dict[str, Any]) -> dict[str, Any] | None:
    """The record of a folder, for a run with this metadata to go on with; None if there is none.

    Raises:
        UserError: the record cannot be read, or was made by other code, on another machine or with other settings.
    """
    if not (folder / RECORD).exists():
        return None
    record = read_record(str(folder / RECORD))
    for name in ("commit", "versions", "hardware", "threads", "settings"):
        now = json.loads(json.dumps(metadata[name]))
        if (before := record.get(name)) != now:
            made = f"{folder / RECORD} was made with {name} {before}, not {now}"
            raise UserError(f"{made}; choose another --output, or pass --overwrite")
    return record


def is_complete(record: dict[str, Any]) -> bool:
    """Whether the run that made a record came to its end and had time for all cases."""
    return "load_average_after" in record and not record["cases_left_out"]


def save_record(record: dict[str, Any], folder: Path) -> None:
    """Writes the unfinished `record.json`, in one line: Python indents JSON many times slower."""
    write_json(folder / RECORD, record, indent=None)


def write_record(record: dict[str, Any], folder: Path) -> None:
    """Writes record, table and plots."""
    write_report(record, format_record(record), folder)
    draw_plots(record, folder)


def write_report(record: dict[str, Any], table: str, folder: Path) -> None:
    """Writes `record.json` and `table.md` into a folder, which is made if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RECORD, record, indent=1)
    write_whole(folder / TABLE, table)


def draw_plots(record: dict[str, Any], folder: Path) -> None:
    """Draws all plots; without Matplotlib, which measuring does not need, prints how to draw them elsewhere."""
    try:
        from .plots import draw_everything
    except ModuleNotFoundError as error:
        command = join(["dynattn", "benchmark", "--redraw", str(folder / RECORD)])
        print(f"no plots: {error}; draw them elsewhere with `{command}`")
    else:
        draw_everything(record, folder)
