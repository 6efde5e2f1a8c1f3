"""Converts an official RCMHA, RMHA, MDHA or MHA checkpoint into ours, or with --reverse one of ours into theirs.

SRC holds the official state dict and a config.json with kind, heads, d_model, d_ff, n_layers, vocab and mem_len, and
where they differ from the official code's also P (4096) and activation (relu).

Run: `dynattn convert rcmha SRC DST [--option value]`
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..common.command_line import conversion_main
from .arguments import RCMHAArguments

if TYPE_CHECKING:  # only for annotations: the plan needs torch
    from .plan import RCMHAConversion


def main(argv: Sequence[str]) -> int:
    """Converts, tells what was read, dropped, written and verified, and returns the exit status."""
    return conversion_main("rcmha", RCMHAArguments, argv, __doc__, convert_rcmha)


def convert_rcmha(arguments: RCMHAArguments) -> "RCMHAConversion":
    """Converts one checkpoint folder; the destination appears when everything went well, and else stays as it was.

    Raises:
        UserError: the source is damaged or not convertible, the destination is taken, or the result is wrong.
    """
    from ...common.folder_names import resolve_folder
    from ..common.driver import convert
    from .plan import plan_forward, plan_reverse

    return convert(arguments, resolve_folder(arguments.source), forward=plan_forward, reverse=plan_reverse)
