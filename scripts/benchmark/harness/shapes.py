"""Shapes as the command line names them, `16x64@2048` or `8x16@128+128`, and the (query, key) pairs in them."""

import re
from dataclasses import dataclass

from ...common.errors import UserError

PATTERN = re.compile(r"(\d+)x(\d+)@(\d+)(?:\+(\d+))?")


@dataclass(frozen=True)
class Shape:
    """Size of a case.

    Attributes:
        heads, width: number of heads, and width of each.
        length: tokens.
        memory: rows of segment memory before the tokens; only the subject `relative` has any.
    """

    heads: int
    width: int
    length: int
    memory: int = 0

    def __str__(self) -> str:
        return f"{self.heads}x{self.width}@{self.length}" + (f"+{self.memory}" if self.memory else "")


def parse_shape(text: str) -> Shape:
    """Reads `HEADSxWIDTH@LENGTH` or `HEADSxWIDTH@LENGTH+MEMORY`.

    Raises:
        UserError: the text has another form, or one of its numbers is zero.
    """
    found = PATTERN.fullmatch(text)
    shape = Shape(*(int(group or 0) for group in found.groups())) if found else None
    if shape is None or not (shape.heads and shape.width and shape.length):
        raise UserError(f"shape {text!r} is not HEADSxWIDTH@LENGTH with positive numbers, such as 16x64@2048")
    return shape


def visible_pairs(length: int, window: int | None, memory: int = 0) -> int:
    """The number of visible (query, key) pairs of one head in causal attention, `memory` keys preceding the queries."""
    reach = memory + length if window is None else window
    return sum(min(memory + query + 1, reach) for query in range(length))
