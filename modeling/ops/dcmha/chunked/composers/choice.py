"""Which composer `dcmha_chunked` works with."""

import os

import torch

from .compiled import COMPILED
from .interface import ChunkComposer
from .native import NATIVE, StageShape, available
from .stepwise import STEPWISE

# A process that has composed this many (head, query, key) triples step by step has worked on them for longer than
# `torch.compile` takes to make the rest faster.
AUTO_ELEMENTS = 10_000_000_000
_composed = 0


def choose_composer(device: torch.device, dtype: torch.dtype, elements: int, *shapes: StageShape) -> ChunkComposer:
    """Returns how to compose the next `elements` triples, in stages of these shapes.

    The environment variable `DYNATTN_COMPILE` decides: `0` compiles nothing. `auto`, the default, compiles C code for
    float32 on a CPU. Elsewhere, and where that does not work, it takes `torch.compile` once this process has composed
    `AUTO_ELEMENTS` triples. `1` is like `auto`, but takes `torch.compile` at once.

    Raises:
        ValueError: the variable has another value.
    """
    global _composed
    mode = os.environ.get("DYNATTN_COMPILE", "auto")
    if mode not in ("0", "1", "auto"):
        raise ValueError(f"DYNATTN_COMPILE={mode!r} is not known; use '0', '1' or 'auto'")
    if mode == "0":
        return STEPWISE
    if device.type == "cpu" and dtype == torch.float32 and available(*shapes):
        return NATIVE
    _composed += elements
    return COMPILED if mode == "1" or _composed > AUTO_ELEMENTS else STEPWISE
