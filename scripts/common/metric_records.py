"""The measurements of a run: a file with one JSON object per line."""

import json
from pathlib import Path
from typing import Any

MetricRecord = dict[str, Any]


def read_metrics(path: Path, split: str | None = None) -> list[MetricRecord]:
    """Reads the records of one split, or all. Lines that are no records, as one that a crash cut off, are left out."""
    records = []
    is_readable = path.exists() and not path.is_fifo()  # opening a named pipe would wait for its other end
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if is_readable else []:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if _is_record(record) and split in (None, record["split"]):
            records.append(record)
    return records


def _is_record(line: Any) -> bool:
    """Whether a line says for which update and which split it was measured."""
    if not isinstance(line, dict) or not isinstance(line.get("split"), str):
        return False
    return isinstance(line.get("step"), int) and is_number(line["step"])


def is_number(value: Any) -> bool:
    """Whether a value of a line is one that a curve can have; other tools write NaN as text, or huge integers."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63)
