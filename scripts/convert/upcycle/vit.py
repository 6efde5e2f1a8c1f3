"""Turns a ViT, DeiT or DINOv2 into a DCViT with the same outputs; with --reverse back, if nothing is composed.

Run: `dynattn convert vit SRC DST [--option value]`
"""

from collections.abc import Sequence

from . import main as upcycle


def main(argv: Sequence[str]) -> int:
    """Converts and returns the exit status."""
    return upcycle.main("vit", argv, __doc__, parent="VIT")
