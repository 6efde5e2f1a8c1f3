"""Text and JSON files that appear as a whole or not at all."""

import json
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Writes a file under another name and renames it, so that no reader ever sees half of it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_json(path: Path, content: Any, *, indent: int | None = 2, **options: Any) -> None:
    """Writes `content` as a JSON file with `write_whole`; `options` are those of `json.dumps`."""
    write_whole(path, json.dumps(content, indent=indent, **options) + "\n")
