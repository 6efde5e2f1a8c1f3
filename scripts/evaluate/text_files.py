"""Reads documents from a file of the user's, and says where it holds something else."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow import ArrowException, parquet  # `datasets` depends on it

from ..common.errors import UserError, first_line

logger = logging.getLogger(__name__)

# The fields of a row, and what an error calls the place where it stands.
Row = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class FileDocuments:
    """The documents of a file.

    Attributes:
        rows: the row of each, counted from 0. Empty lines are no rows.
        without_text: how many rows have no text.
    """

    texts: list[str]
    rows: list[int]
    without_text: int


def read_documents(path: str, column: str) -> FileDocuments:
    """The documents in a text file (one), or in the column of a JSON lines, JSON or Parquet file (one a row).

    Rows whose column is absent, null, empty or no text are left out, which a warning tells.

    Raises:
        UserError: the file cannot be read, lacks the column, or holds no text.
    """
    read = READERS.get(Path(path).suffix)
    if read is None:
        raise UserError(f"dataset={path!r} must be a file that ends in {', '.join(READERS)}")
    if not Path(path).is_file():
        raise UserError(f"dataset={path!r} is no file; check its name")
    try:
        rows = list(read(Path(path), column))
    except (OSError, ValueError, RecursionError, ArrowException) as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from error
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    if rows and column not in names:
        raise UserError(f"{path} has no column {column!r} but {names}; name it with --text_column")
    texts = {index: text for index, (_, row) in enumerate(rows) if isinstance(text := row.get(column), str) and text}
    if not texts:
        raise UserError(f"{path} holds no text in its column {column!r}")
    for index, text in texts.items():
        _check_unicode(path, rows[index][0], text)
    empty = [place for index, (place, _) in enumerate(rows) if index not in texts]
    if empty:
        message = "%d of %d rows of %s have no text in their column %r and are left out, the first is %s"
        logger.warning(message, len(empty), len(rows), path, column, empty[0])
    return FileDocuments(list(texts.values()), list(texts), len(empty))


def _read_text(path: Path, column: str) -> Iterator[Row]:
    yield "the text", {column: path.read_bytes().decode("utf-8-sig")}  # with its line ends as they are


def _read_json(path: Path, column: str) -> Iterator[Row]:
    """The rows of one array of objects, or of one object in each line."""
    content = path.read_text(encoding="utf-8-sig")
    if content.lstrip().startswith("["):
        found = ((f"row {index}", row) for index, row in enumerate(_parse(content)))
    else:
        # Not `splitlines`: texts may hold other characters that end lines.
        lines = enumerate(content.split("\n"), start=1)
        found = ((f"line {number}", _parse(line, number)) for number, line in lines if line.strip())
    for place, row in found:
        if not isinstance(row, dict):
            raise ValueError(f"{place} is no object with fields")
        yield place, row


def _parse(text: str, line: int = 1) -> Any:
    """The content of JSON that begins in line `line` of its file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {line + error.lineno - 1} is no JSON: {error.msg}") from error


def _read_parquet(path: Path, column: str) -> Iterator[Row]:
    with path.open("rb") as file:  # a path with colons would be read as an address
        table = parquet.ParquetFile(file)
        names = table.schema_arrow.names
        chosen = [column] if column in names else []
        values = table.read(columns=chosen).to_pylist()
    for index, row in enumerate(values):
        yield f"row {index}", row or dict.fromkeys(names)


def _check_unicode(path: str, place: str, text: str) -> None:
    """Raises UserError if a text has half of a surrogate pair, which JSON can write and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise UserError(f"cannot read {path}: {place} has {half}, half of a surrogate pair; mend the text") from error


READERS: Mapping[str, Callable[[Path, str], Iterator[Row]]] = {
    ".txt": _read_text,
    ".jsonl": _read_json,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
