"""A command that chooses among others: `dynattn`, `dynattn convert`, `dynattn reproduce`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from .errors import UserError

# The environment variable with the modules of `--import`, separated by commas, so that processes of a job import them.
IMPORTS = "DYNATTN_IMPORT"


def imported_modules() -> list[str]:
    """The modules of the user's that the environment names, in their order."""
    return [*filter(None, os.environ.get(IMPORTS, "").split(","))]


def import_words() -> list[str]:
    """`--import MODULE` for each module of the user's, as the command line in a record has to name them."""
    return [word for name in imported_modules() for word in ("--import", name)]


@dataclass(frozen=True)
class CommandTable:
    """Commands by name. The module of a command is imported when it is run, and has a function of `argv`.

    Attributes:
        prog: what a user types before the name of a command.
        noun: what messages call one of the commands, such as "command" or "direction".
        usage: what a user types after `prog`, such as "COMMAND".
        commands: for each name its module and one line of help. The function is `main`, or stands behind a colon.
        notes: lines at the end of the help.
    """

    prog: str
    noun: str
    usage: str
    commands: Mapping[str, tuple[str, str]]
    notes: str = ""

    def run(self, argv: Sequence[str]) -> int:
        """Runs the command that the first word names with the other words, and returns its exit status.

        Raises:
            UserError: there is no such command, or it refuses its words; the error then names it.
        """
        if not argv or argv[0] in ("-h", "--help"):
            print(self.help())
            return 0 if argv else 2
        name, *rest = argv
        if name not in self.commands:
            raise UserError(f"unknown {self.noun} {name!r}; choose from {', '.join(self.commands)}")
        module, _, function = self.commands[name][0].partition(":")
        try:
            return getattr(import_module(module), function or "main")(rest)
        except UserError as error:
            error.command = error.command or f"{self.prog} {name}"
            raise

    def help(self) -> str:
        """The help text: every command with one line."""
        width = max(map(len, self.commands)) + 2
        lines = [f"  {name:<{width}}{text}" for name, (_, text) in self.commands.items()]
        hint = f"({self.prog} {self.usage.split()[0]} --help lists the options)"
        notes = ["", self.notes] if self.notes else []
        return "\n".join([f"usage: {self.prog} {self.usage} [options]    {hint}", "", *lines, *notes])
