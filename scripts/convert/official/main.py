"""Converts an official DCFormer or DCPythia checkpoint into ours, or with --reverse one of ours into theirs.

Run: `dynattn convert official SRC DST [--option value]`
"""

from collections.abc import Sequence

from ... import convert as library
from ..common.command_line import conversion_main
from .arguments import OfficialArguments


def main(argv: Sequence[str]) -> int:
    """Converts, tells what was read, dropped, written and verified, and returns the exit status."""
    # The conversion is imported when it is called, because it needs torch.
    return conversion_main(
        "official", OfficialArguments, argv, __doc__, lambda arguments: library.convert_official(arguments)
    )
