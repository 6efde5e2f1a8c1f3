"""Upcycling as a library function, and the command line that the families of parents share.

A family has a module of its own beside this one (`bart`, `llama`, `modernbert`, `pythia`, `vit`), whose docstring is
its `--help`.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ... import convert as library
from ..common.command_line import conversion_main
from .arguments import UpcycleArguments

if TYPE_CHECKING:  # only for annotations: both need torch
    from .parents.interface import Parent
    from .plan import Upcycling


def main(kind: str, argv: Sequence[str], description: str | None, parent: str) -> int:
    """Runs `dynattn convert KIND`: converts, tells what was read, dropped, written and verified; returns the status.

    Args:
        kind: the conversion's name on the command line.
        argv: what follows the name.
        description: for `--help`.
        parent: the name of the `Parent` in `dynattn.scripts.convert`, which imports it when the conversion begins.
    """

    def convert(arguments: UpcycleArguments) -> "Upcycling":
        return upcycle_checkpoint(arguments, getattr(library, parent))

    return conversion_main(kind, UpcycleArguments, argv, description, convert)


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
