"""Random rows of symbols and what they turn into, which the studies of positions and of encoder-decoders ask for."""

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Tokens = NDArray[np.int64]

SYMBOLS = 50
# How many symbols are drawn from where they may repeat, as in the paper of the first study (arXiv 2305.19466).
COPIED = 20


def copy_many(rng: Generator, batch: int, length: int) -> tuple[Tokens, Tokens]:
    """Symbols, and the same again."""
    prompt = rng.integers(COPIED, size=(batch, length))
    return prompt, prompt


def reverse(rng: Generator, batch: int, length: int) -> tuple[Tokens, Tokens]:
    """Symbols, and the same from the last to the first."""
    prompt = rng.integers(COPIED, size=(batch, length))
    return prompt, prompt[:, ::-1]


def sort(rng: Generator, batch: int, length: int) -> tuple[Tokens, Tokens]:
    """Different symbols, and the same in their order."""
    prompt = rng.permuted(np.tile(np.arange(SYMBOLS), (batch, 1)), axis=1)[:, :length]
    return prompt, np.sort(prompt, axis=1)
