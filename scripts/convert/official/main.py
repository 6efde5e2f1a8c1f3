"""Converts an official DCFormer or DCPythia checkpoint into ours, or with --reverse one of ours into theirs.

Run: `dynattn convert official SRC DST [--option value]`
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..common.command_line import conversion_main
from .arguments import OfficialArguments

if TYPE_CHECKING:  # only for annotations: the plan needs torch
    from .plan import Conversion


def main(argv: Sequence[str]) -> int:
    """Converts, tells what was read, dropped, written and verified, and returns the exit status."""
    return conversion_main("official", OfficialArguments, argv, __doc__, convert_official)


def convert_official(arguments: OfficialArguments) -> "Conversion":
    """Converts one checkpoint folder; the destination appears when everything went well, and else stays as it was.

    Raises:
        UserError: the source is damaged or not convertible, the destination is taken, or the result is wrong.
    """
    from ...common.folder_names import resolve_folder
    from ..common.driver import convert
    from .plan import plan_forward, plan_reverse

    return convert(arguments, resolve_folder(arguments.source), forward=plan_forward, reverse=plan_reverse)
