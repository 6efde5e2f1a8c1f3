"""Upcycling as a library function, and the command of each family of parents."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ... import convert as library
from ..common.command_line import conversion_main
from .arguments import UpcycleArguments

if TYPE_CHECKING:  # only for annotations: both need torch
    from .parents.interface import Parent
    from .plan import Upcycling


HELP = """\
Turns {what} with the same outputs; with --reverse back, if nothing is composed.

Run: `dynattn convert {kind} SRC DST [--option value]`
"""


def main(kind: str, parent: str, what: str, argv: Sequence[str]) -> int:
    """Runs `dynattn convert KIND`: converts, tells what was read, dropped, written and verified; returns the status.

    Args:
        kind: the conversion's name on the command line.
        parent: the name of the `Parent` in `dynattn.scripts.convert`, which imports it when the conversion begins.
        what: which model it turns into which, for `--help`.
        argv: what follows the name.
    """

    def convert(arguments: UpcycleArguments) -> "Upcycling":
        return upcycle_checkpoint(arguments, getattr(library, parent))

    return conversion_main(kind, UpcycleArguments, argv, HELP.format(what=what, kind=kind), convert)


bart = partial(main, "bart", "BART_MARIAN", "a BART or Marian into a DCBart")
llama = partial(main, "llama", "LLAMA", "a Llama, Mistral or Qwen2/3 into a DCFormer")
modernbert = partial(main, "modernbert", "MODERNBERT", "a ModernBERT into a DCModernBert")
pythia = partial(main, "pythia", "NEOX", "a Pythia, or any GPT-NeoX, into a DCPythia")
vit = partial(main, "vit", "VIT", "a ViT, DeiT or DINOv2 into a DCViT")


def upcycle_checkpoint(arguments: UpcycleArguments, parent: "Parent") -> "Upcycling":
    """Converts one checkpoint; the destination appears when everything went well, and else stays as it was.

    Raises:
        UserError: the source is damaged or not convertible, the destination is taken, or the result is wrong.
    """
    from ..common.driver import convert
    from ..common.hub import locate
    from .plan import plan_plain, plan_upcycling

    source = locate(arguments.source, arguments.revision)
    return convert(
        arguments, source, forward=partial(plan_upcycling, parent=parent), reverse=partial(plan_plain, parent=parent)
    )
