"""Turns a Llama, Mistral or Qwen2/3 into a DCFormer with the same outputs; with --reverse back, if nothing is composed.

Run: `dynattn convert llama SRC DST [--option value]`
"""

from collections.abc import Sequence

from . import main as upcycle


def main(argv: Sequence[str]) -> int:
    """Converts and returns the exit status."""
    return upcycle.main("llama", argv, __doc__, parent="LLAMA")
