"""Decides what `dcmha_chunked` compiles: C code, or a composer with `torch.compile`."""

import os

from .compiled import COMPILED
from .interface import ChunkComposer
from .stepwise import STEPWISE

# A process that has composed this many (head, query, key) triples step by step has spent more time on that than
# `torch.compile` takes, and is likely to compose as many again.
AUTO_ELEMENTS = 10_000_000_000
_composed = 0


def compile_mode() -> str:
    """Returns the environment variable `DYNATTN_COMPILE`, which decides what is compiled.

    `0` compiles nothing. `auto`, the default, compiles C code on a CPU. On other devices, and where compiling C does
    not work, it uses `torch.compile` once this process has composed `AUTO_ELEMENTS` triples. `1` is like `auto`, but
    uses `torch.compile` from the start.

    Raises:
        ValueError: the variable has another value.
    """
    mode = os.environ.get("DYNATTN_COMPILE", "auto")
    if mode not in ("0", "1", "auto"):
        raise ValueError(f"DYNATTN_COMPILE={mode!r} is not known; use '0', '1' or 'auto'")
    return mode


def choose_composer(elements: int) -> ChunkComposer:
    """Returns the composer for the next `elements` (head, query, key) triples, which C code does not compose."""
    global _composed
    mode = compile_mode()
    if mode == "0":
        return STEPWISE
    _composed += elements
    return COMPILED if mode == "1" or _composed > AUTO_ELEMENTS else STEPWISE
