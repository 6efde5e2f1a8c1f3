"""Repeats a study: trains its models, then writes a table, plots and the record from which both are made.

Run: `dynattn reproduce STUDY [--option value]`
"""

from collections.abc import Sequence
from importlib import import_module

from ..common.errors import UserError

STUDIES = {
    "tiny-shakespeare": (
        "dynattn.scripts.reproduce.tiny_shakespeare.main",
        "the RCMHA paper's four attention types on characters",
    ),
    "quickstart": ("dynattn.scripts.reproduce.quickstart", "a small DCFormer beside a plain Transformer"),
    "upcycling": (
        "dynattn.scripts.reproduce.upcycling.main",
        "continued training of a GPT-NeoX with and without composition",
    ),
}


def main(argv: Sequence[str]) -> int:
    """Runs one study and returns its exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    study, *rest = argv
    if study not in STUDIES:
        raise UserError(f"unknown study {study!r}; choose from {', '.join(STUDIES)}")
    module, _ = STUDIES[study]
    return import_module(module).main(rest)


def usage() -> str:
    """The help text: every study with one line."""
    lines = [f"  {name:<18}{text}" for name, (_, text) in STUDIES.items()]
    return "\n".join(["usage: dynattn reproduce STUDY [options]    (dynattn reproduce STUDY --help)", "", *lines])
