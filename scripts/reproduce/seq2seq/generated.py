"""Generated pairs: one model copies, reverses, sorts or doubles a sequence, as its first token says."""

from collections.abc import Callable

import numpy as np
from numpy.random import Generator

from ..transformations import SYMBOLS, Tokens, copy_many, reverse, sort
from .pairs import FIRST_TOKEN, Batch, make_batch


def double(rng: Generator, batch: int, length: int) -> tuple[Tokens, Tokens]:
    """Symbols, and each of them twice."""
    source, _ = copy_many(rng, batch, length)
    return source, np.repeat(source, 2, axis=1)


TRANSFORMATIONS: dict[str, Callable[[Generator, int, int], tuple[Tokens, Tokens]]] = {
    "copy": copy_many,
    "reverse": reverse,
    "sort": sort,
    "double": double,
}
FIRST_SYMBOL = FIRST_TOKEN + len(TRANSFORMATIONS)
VOCABULARY = FIRST_SYMBOL + SYMBOLS


def draw_pairs(names: list[str], rng: Generator, number: int, length: int) -> Batch:
    """`number` pairs for each of the named transformations, all of sources of one length."""
    sources: list[list[int]] = []
    targets: list[list[int]] = []
    for name in names:
        task = FIRST_TOKEN + list(TRANSFORMATIONS).index(name)
        source, target = TRANSFORMATIONS[name](rng, number, length)
        sources += [[task, *row] for row in (source + FIRST_SYMBOL).tolist()]
        targets += (target + FIRST_SYMBOL).tolist()
    return make_batch(sources, targets)
