"""Turns a Pythia, or any GPT-NeoX, into a DCPythia with the same outputs; with --reverse back, if nothing is composed.

Run: `dynattn convert pythia SRC DST [--option value]`
"""

from collections.abc import Sequence

from . import main as upcycle


def main(argv: Sequence[str]) -> int:
    """Converts and returns the exit status."""
    return upcycle.main("pythia", argv, __doc__, parent="NEOX")
