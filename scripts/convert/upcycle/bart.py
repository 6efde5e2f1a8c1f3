"""Turns a BART or Marian into a DCBart with the same outputs; with --reverse back, if nothing is composed.

Run: `dynattn convert bart SRC DST [--option value]`
"""

from collections.abc import Sequence

from . import main as upcycle


def main(argv: Sequence[str]) -> int:
    """Converts and returns the exit status."""
    return upcycle.main("bart", argv, __doc__, parent="BART_MARIAN")
