"""Tables in Markdown."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Cells = Sequence[str]


def table(head: Cells, rows: Iterable[Cells]) -> str:
    """A table of `rows` below `head`, a cell of which is as wide as its text."""
    return "\n".join(_line(row) for row in (head, ["---"] * len(head), *rows))


def joined_table(
    head: Cells, columns: Sequence[Mapping[tuple[Any, ...], str]], label: Callable[..., Sequence[str]]
) -> str:
    """A table with a row for each key of `columns`; a column without that key has an empty cell there.

    Args:
        head: of the cells that `label` makes, and then of the columns.
        label: makes the first cells of a row from the elements of its key.
    """
    keys = sorted({key for column in columns for key in column})
    return table(head, ([*label(*key), *(column.get(key, "") for column in columns)] for key in keys))


def aligned_table(head: Cells, rows: Iterable[Cells]) -> list[str]:
    """The lines of a table whose cells are padded, so that its columns are straight on a terminal too.

    Raises:
        ValueError: a row has more or fewer cells than the head.
    """
    rows = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * max(width, 1) for width in widths]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return [_line(row) for row in (padded[0], rule, *padded[1:])]


def _line(cells: Cells) -> str:
    escaped = (cell.replace("|", r"\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"
