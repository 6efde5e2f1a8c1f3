"""Turns a Pythia, or any GPT-NeoX, into a DCPythia that starts as it; with --reverse back, if nothing is composed.

Run: `dynattn convert pythia SRC DST [--option value]`
"""

from collections.abc import Sequence

from .neox_layout import NEOX
from .upcycle import run


def main(argv: Sequence[str]) -> int:
    """Converts and returns the exit status."""
    return run(NEOX, "pythia", argv, __doc__)
