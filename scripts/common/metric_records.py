"""The measurements of a run: a file with one JSON object per line."""

import json
from pathlib import Path
from typing import Any

MetricRecord = dict[str, Any]


def read_metrics(path: Path, split: str | None = None) -> list[MetricRecord]:
    """Reads the records of one split, or all. Lines that are no records are left out, as one that a crash cut off."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if _is_record(record) and split in (None, record["split"]):
            records.append(record)
    return records


def _is_record(line: Any) -> bool:
    """Whether a line says for which update and which split it was measured."""
    return isinstance(line, dict) and isinstance(line.get("step"), int) and isinstance(line.get("split"), str)
