"""The command line of every conversion: parse, convert, report.

Neither torch nor Transformers is imported before the arguments are parsed, so that `--help` and mistakes answer fast.
"""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ...common.arguments import parse_arguments
from .arguments import ConversionArguments

if TYPE_CHECKING:  # only for annotations: the driver needs torch
    from .driver import ConversionPlan

Arguments = TypeVar("Arguments")


def conversion_main(
    kind: str,
    cls: type[ConversionArguments],
    argv: Sequence[str],
    description: str | None,
    convert: "Callable[[Any], ConversionPlan]",
) -> int:
    """Runs `dynattn convert KIND SRC DST`, prints warnings and the report, and returns the exit status.

    Args:
        kind: the conversion's name on the command line.
        cls: dataclass of its arguments.
        argv: what follows the name.
        description: for `--help`.
        convert: makes the conversion; it imports what computes when it is called.
    """
    conversion = convert(parse_with_folders(cls, argv, f"dynattn convert {kind} SRC DST", description))
    for warning in conversion.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print("\n".join(conversion.report()))
    return 0


def parse_with_folders(cls: type[Arguments], argv: Sequence[str], prog: str, description: str | None) -> Arguments:
    """Parses arguments whose first two fields may be given by position, and turns off Transformers' progress bars."""
    arguments = parse_arguments(cls, argv, prog=prog, description=description, words=2)

    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return arguments
