"""Turns a BART or Marian into a DCBart that starts as it; with --reverse back, if nothing is composed.

Run: `dynattn convert bart SRC DST [--option value]`
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import main as upcycle

if TYPE_CHECKING:  # only for the annotation: it needs Transformers
    from .parents.interface import Parent


def main(argv: Sequence[str]) -> int:
    """Converts and returns the exit status."""
    return upcycle.main("bart", argv, __doc__, load_parent)


def load_parent() -> "Parent":
    """Imports the family when it is needed."""
    from .parents.bart import BART_MARIAN

    return BART_MARIAN
