"""Repeats a study: trains its models, then writes a table, plots and the record from which both are made.

Run: `dynattn reproduce STUDY [--option value]`
"""

from ..common.commands import CommandTable

STUDIES = CommandTable(
    prog="dynattn reproduce",
    noun="study",
    usage="STUDY",
    commands={
        "tiny-shakespeare": (
            "dynattn.scripts.reproduce.tiny_shakespeare.main",
            "the RCMHA paper's four attention types on characters",
        ),
        "quickstart": ("dynattn.scripts.reproduce.quickstart", "a small DCFormer beside a plain Transformer"),
        "upcycling": (
            "dynattn.scripts.reproduce.upcycling.main",
            "continued training of a GPT-NeoX with and without composition",
        ),
    },
)
main = STUDIES.run
