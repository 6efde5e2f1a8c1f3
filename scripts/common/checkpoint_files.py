"""The files of a checkpoint folder that a user named: reading its `config.json`, finding what lies beside it."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .errors import UserError

# Patterns of file names: a tokenizer's, and those of what else lies beside weights and configuration.
TOKENIZER_PATTERNS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "*.model", "*.tiktoken", "*.jinja"),
)
COMPANION_PATTERNS = ("generation_config.json", "LICENSE*", "NOTICE*")


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the content of `config.json`.

    Raises:
        UserError: the folder, or the file, is missing or damaged.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist (a model on the Hub must be downloaded first)"
        raise UserError(f"{folder} {what}; give the folder of a checkpoint")
    if not (folder / "config.json").is_file():
        what = "has no config.json" if any(folder.iterdir()) else "is empty"
        raise UserError(f"{folder} {what}; give the folder of a checkpoint")
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{folder / 'config.json'} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{folder / 'config.json'} must hold an object, not a {type(content).__name__}")
    return content


def matching_files(folder: Path, patterns: Iterable[str]) -> list[str]:
    """The sorted names of the files in `folder` that match one of `patterns`."""
    return sorted({path.name for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
