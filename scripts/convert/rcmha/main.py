"""Converts an official RCMHA, RMHA, MDHA or MHA checkpoint into ours, or with --reverse one of ours into theirs.

SRC holds the official state dict and a config.json with kind, heads, d_model, d_ff, n_layers, vocab and mem_len, and
where they differ from the official code's also P (4096) and activation (relu).

Run: `dynattn convert rcmha SRC DST [--option value]`
"""

from collections.abc import Sequence

from ... import convert as library
from ..common.command_line import conversion_main
from .arguments import RCMHAArguments


def main(argv: Sequence[str]) -> int:
    """Converts, tells what was read, dropped, written and verified, and returns the exit status."""
    # The conversion is imported when it is called, because it needs torch.
    return conversion_main("rcmha", RCMHAArguments, argv, __doc__, lambda arguments: library.convert_rcmha(arguments))
