"""The folder of a study: which study it belongs to, and the table and the plot that are made from its record."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..common.atomic_file import write_json, write_whole
from ..common.errors import UserError

SETTINGS, RECORD, TABLE = "study.json", "record.json", "table.md"


def claim(output: Path, settings: Mapping[str, Any], study: str) -> None:
    """Reserves the folder for a study with these settings. To continue the study they must be the same.

    Raises:
        UserError: the folder holds a study with other settings, or something else; the message calls it a `study`.
    """
    marker = output / SETTINGS
    if marker.exists():
        stored = json.loads(marker.read_text(encoding="utf-8"))
        if changed := [name for name in settings if stored.get(name) != json.loads(json.dumps(settings[name]))]:
            raise UserError(f"{output} holds a study with other {', '.join(changed)}; give another --output")
    elif output.exists() and any(output.iterdir()):
        raise UserError(f"{output} holds something that is no {study}; give a new or empty --output")
    output.mkdir(parents=True, exist_ok=True)
    write_json(marker, settings, indent=1)


def draw(
    output: Path,
    table: Callable[[Mapping[str, Any]], str],
    plot: Callable[[Mapping[str, Any], Path], None],
    plot_name: str,
) -> str:
    """Makes the table and the plot from the record alone; returns the table and the names of the files.

    Raises:
        UserError: there is no record.
    """
    try:
        record = json.loads((output / RECORD).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{output} holds no {RECORD}; run the study without --redraw first") from error
    text = table(record)
    write_whole(output / TABLE, text + "\n")
    plot(record, output / plot_name)
    return f"\n{text}\n\n{output}: {RECORD}, {TABLE}, {plot_name}"
