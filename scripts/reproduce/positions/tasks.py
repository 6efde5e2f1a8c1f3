"""The generated tasks: `BOS prompt SEP answer EOS` in single tokens, in batches of one length."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from ..transformations import SYMBOLS, Tokens, copy_many, reverse, sort

BOS, SEP, EOS, PLUS, FIRST_SYMBOL = range(5)
VOCABULARY = FIRST_SYMBOL + SYMBOLS
TEST_RATIO = 2.5


class Batch(NamedTuple):
    """Examples of one length."""

    tokens: Tokens  # [B, N], with BOS and EOS
    answer: int  # the place of the first token of the answer, to which EOS belongs


def copy_one(rng: Generator, batch: int, length: int) -> tuple[Tokens, Tokens]:
    """One symbol, `length` times, and the same again."""
    prompt = np.repeat(rng.integers(SYMBOLS, size=(batch, 1)), length, axis=1)
    return prompt, prompt


def sum_digits(rng: Generator, batch: int, length: int) -> tuple[Tokens, Tokens]:
    """Digits, and the last digit of their sum."""
    prompt = rng.integers(10, size=(batch, length))
    return prompt, prompt.sum(1, keepdims=True) % 10


def parity(rng: Generator, batch: int, length: int) -> tuple[Tokens, Tokens]:
    """Bits, and whether the number of ones is odd."""
    prompt = rng.integers(2, size=(batch, length))
    return prompt, prompt.sum(1, keepdims=True) % 2


def add(rng: Generator, batch: int, length: int) -> tuple[Tokens, Tokens]:
    """Two numbers of `length` digits, and their sum in one digit more."""
    summands = rng.integers(10, size=(2, batch, length))
    total, carry = np.zeros((batch, length + 1), dtype=np.int64), np.zeros(batch, dtype=np.int64)
    for place in range(length - 1, -1, -1):
        here = summands[:, :, place].sum(0) + carry
        total[:, place + 1], carry = here % 10, here // 10
    total[:, 0] = carry
    plus = np.full((batch, 1), PLUS - FIRST_SYMBOL)
    return np.concatenate([summands[0], plus, summands[1]], axis=1), total


def add_reversed(rng: Generator, batch: int, length: int) -> tuple[Tokens, Tokens]:
    """The same with all numbers from the last digit to the first, in which order carries arise."""
    prompt, answer = add(rng, batch, length)
    first, plus, second = prompt[:, :length], prompt[:, length : length + 1], prompt[:, length + 1 :]
    return np.concatenate([first[:, ::-1], plus, second[:, ::-1]], axis=1), answer[:, ::-1]


GENERATORS: dict[str, Callable[[Generator, int, int], tuple[Tokens, Tokens]]] = {
    "copy-one": copy_one,
    "copy-many": copy_many,
    "reverse": reverse,
    "sort": sort,
    "sum": sum_digits,
    "parity": parity,
    "addition": add,
    "addition-reversed": add_reversed,
}


def make_batch(task: str, rng: Generator, batch: int, length: int) -> Batch:
    """Random examples of a task of one length."""
    prompt, answer = GENERATORS[task](rng, batch, length)
    bos, sep, eos = (np.full((batch, 1), token) for token in (BOS, SEP, EOS))
    parts = [bos, prompt + FIRST_SYMBOL, sep, answer + FIRST_SYMBOL, eos]
    return Batch(np.concatenate(parts, axis=1), prompt.shape[1] + 2)


def trained_length(task: str, longest: int) -> int:
    """The longest trained length: `longest`, or if that is 0 what the paper has for tasks of that kind."""
    if longest:
        return longest
    return 20 if task in ("copy-one", "copy-many", "reverse") else 8


def lengths_to_test(trained: int) -> range:
    """All lengths from 1 to 2.5 times the longest trained one."""
    return range(1, int(TEST_RATIO * trained) + 1)
