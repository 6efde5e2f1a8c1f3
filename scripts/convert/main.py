"""Turns checkpoints of other code into ours, and back.

Run: `dynattn convert KIND SRC DST [--option value]`

A new kind is its arguments, its plan (see `common/driver.py`), its weight map, an entry point, and a line in the table.
"""

from collections.abc import Sequence
from importlib import import_module

from ..common.errors import UserError

SUB_JOBS = {
    "official": ("dynattn.scripts.convert.official.main", "DCFormer and DCPythia as the authors released them"),
    "rcmha": ("dynattn.scripts.convert.rcmha.main", "RCMHA, RMHA, MDHA and MHA as their authors' code stores them"),
    "pythia": ("dynattn.scripts.convert.upcycle.pythia", "Pythia or another GPT-NeoX to a DCPythia that starts as it"),
    "llama": ("dynattn.scripts.convert.upcycle.llama", "Llama, Mistral or Qwen3 into a DCFormer that starts as it"),
    "check": ("dynattn.scripts.convert.check", "compare the logits of any two checkpoints"),
}


def main(argv: Sequence[str]) -> int:
    """Runs one kind of conversion and returns its exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    sub_job, *rest = argv
    if sub_job not in SUB_JOBS:
        raise UserError(f"unknown conversion {sub_job!r}; choose from {', '.join(SUB_JOBS)}")
    module, _ = SUB_JOBS[sub_job]
    return import_module(module).main(rest)


def usage() -> str:
    """The help text: every conversion with one line."""
    lines = [f"  {name:<12}{text}" for name, (_, text) in SUB_JOBS.items()]
    return "\n".join(["usage: dynattn convert KIND SRC DST [options]    (dynattn convert KIND --help)", "", *lines])
