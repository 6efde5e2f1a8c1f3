"""Turns a ModernBERT into a DCModernBert with the same outputs; with --reverse back, if nothing is composed.

Run: `dynattn convert modernbert SRC DST [--option value]`
"""

from collections.abc import Sequence

from . import main as upcycle


def main(argv: Sequence[str]) -> int:
    """Converts and returns the exit status."""
    return upcycle.main("modernbert", argv, __doc__, parent="MODERNBERT")
