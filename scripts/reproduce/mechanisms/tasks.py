"""Tasks in which a sequence states facts and asks about them; fresh sequences are drawn for every update.

A task draws tokens `[N, T]` and targets `[N, T]`: the token that should follow each position, or `IGNORED` where
nothing is asked. Every sequence asks about everything that it states: with a single question in each, small models stay
far from solving the harder tasks for thousands of updates.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Generator, Tensor

from dynattn.modeling.ops.chunked_loss import IGNORED


class Task(Protocol):
    """What a study trains on.

    Attributes:
        vocabulary: number of tokens.
        length: tokens of a sequence.
    """

    @property
    def vocabulary(self) -> int: ...

    @property
    def length(self) -> int: ...

    def sample(self, number: int, random: Generator) -> tuple[Tensor, Tensor]:
        """Draws `number` sequences: tokens and targets, both `[number, length]`."""


def permutations(number: int, size: int, random: Generator) -> Tensor:
    """Independent random orders of `size` things, `[number, size]`."""
    return torch.rand(number, size, generator=random).argsort(dim=1)


def asked_at(tokens: Tensor, positions: slice, answers: Tensor) -> Tensor:
    """Targets that ask for `answers` at some positions, and for nothing elsewhere."""
    targets = torch.full_like(tokens, IGNORED)
    targets[:, positions] = answers
    return targets


@dataclass(frozen=True)
class Recall:
    """Multi-query associative recall (MQAR; Zoology, arXiv 2312.04927, section 3).

    `pairs` keys, each with a value behind it; then all keys again in another order, each asking for its value.
    """

    pairs: int
    values: int = 32

    @property
    def vocabulary(self) -> int:
        return 2 * self.pairs + self.values

    @property
    def length(self) -> int:
        return 3 * self.pairs

    def sample(self, number: int, random: Generator) -> tuple[Tensor, Tensor]:
        """Keys are tokens from `values` on, of which every sequence uses half."""
        keys = self.values + permutations(number, 2 * self.pairs, random)[:, : self.pairs]
        values = torch.randint(self.values, keys.shape, generator=random)
        facts = torch.stack([keys, values], dim=2).flatten(1)
        order = permutations(number, self.pairs, random)
        tokens = torch.cat([facts, keys.gather(1, order)], dim=1)
        return tokens, asked_at(tokens, slice(2 * self.pairs, None), values.gather(1, order))


@dataclass(frozen=True)
class Hops:
    """Recall in one step and in more: k-hop induction (Sanford et al., arXiv 2402.09268) with all k up to `hops`.

    Pairs state a random map of `symbols` onto themselves. Then each symbol, with a number of steps behind it, asks
    where so many steps lead, once for every number. Three layers that were asked for two steps alone did not learn
    them.
    """

    symbols: int
    hops: int = 2

    @property
    def vocabulary(self) -> int:
        return self.symbols + self.hops

    @property
    def length(self) -> int:
        return 2 * self.symbols * (1 + self.hops)

    def sample(self, number: int, random: Generator) -> tuple[Tensor, Tensor]:
        """Symbols are the first tokens, and numbers of steps the last ones, which ask."""
        image = permutations(number, self.symbols, random)
        sources = permutations(number, self.symbols, random)
        facts = torch.stack([sources, image.gather(1, sources)], dim=2).flatten(1)
        reached = [image]
        for _ in range(self.hops - 1):
            reached.append(image.gather(1, reached[-1]))
        order = permutations(number, self.symbols * self.hops, random)
        questions = torch.stack([order % self.symbols, self.symbols + order // self.symbols], dim=2).flatten(1)
        tokens = torch.cat([facts, questions], dim=1)
        answers = torch.cat(reached, dim=1).gather(1, order)
        return tokens, asked_at(tokens, slice(2 * self.symbols + 1, None, 2), answers)


@dataclass(frozen=True)
class FindBlock:
    """Find the block that holds all asked letters (multi-token attention's toy task; arXiv 2504.00927, section 4.1).

    `blocks` blocks of `size` different letters, each with a full stop behind it; then for each block, in another order,
    `asked` of its letters and a question mark that asks for its first letter. No single letter tells the block: each
    asked letter also stands in another block, but no other block holds all asked letters.
    """

    blocks: int
    size: int = 4
    asked: int = 2
    letters: int = 24

    @property
    def vocabulary(self) -> int:
        return self.letters + 2

    @property
    def length(self) -> int:
        return self.blocks * (self.size + 1 + self.asked + 1)

    def sample(self, number: int, random: Generator) -> tuple[Tensor, Tensor]:
        """Draws again until there are enough sequences in which every block can be asked for."""
        found: list[tuple[Tensor, Tensor]] = []
        while sum(len(tokens) for tokens, _ in found) < number:
            found.append(self._draw(number, random))
        tokens, targets = (torch.cat(parts)[:number] for parts in zip(*found, strict=True))
        return tokens, targets

    def _draw(self, number: int, random: Generator) -> tuple[Tensor, Tensor]:
        letters = permutations(number * self.blocks, self.letters, random)[:, : self.size]
        blocks = letters.view(number, self.blocks, self.size)
        asked, found = self._questions(blocks, random)
        blocks, asked = blocks[found], asked[found]
        order = permutations(len(blocks), self.blocks, random)[..., None]
        stops = torch.full((len(blocks), self.blocks, 1), self.letters)
        questions = torch.cat([asked, stops + 1], dim=2)
        questions = questions.gather(1, order.expand_as(questions))
        tokens = torch.cat([torch.cat([blocks, stops], dim=2).flatten(1), questions.flatten(1)], dim=1)
        asking = slice(self.blocks * (self.size + 1) + self.asked, None, self.asked + 1)
        return tokens, asked_at(tokens, asking, blocks[..., :1].gather(1, order).squeeze(2))

    def _questions(self, blocks: Tensor, random: Generator) -> tuple[Tensor, Tensor]:
        """Letters to ask for each block with `[number, blocks, asked]`, and whether all blocks have some `[number]`."""
        sets = blocks[:, :, torch.combinations(torch.arange(self.size), self.asked)]  # [number, blocks, sets, asked]
        # Whether a block (the second dimension) holds each letter of each set of each block.
        holds = (blocks[:, :, None, None, None] == sets[:, None, ..., None]).any(dim=-1)
        told_by_one = holds.sum(dim=1).eq(1).any(dim=-1)
        usable = holds.all(dim=-1).sum(dim=1).eq(1) & ~told_by_one  # [number, blocks, sets]
        chosen = (torch.rand(usable.shape, generator=random) * usable).argmax(dim=2)
        asked = sets.take_along_dim(chosen[..., None, None], dim=2).squeeze(2)
        order = permutations(asked[..., 0].numel(), self.asked, random).view_as(asked)
        return asked.gather(2, order), usable.any(dim=2).all(dim=1)


@dataclass(frozen=True)
class OrderedMatch:
    """Which value follows two letters in this order? A task of our own.

    Every fact is two letters and a value, and beside each stands the fact of the same letters in the other order, with
    another value; then the letters of all facts in another order, each pair asking for its value. Finding both letters
    is not enough, and neither is either of them.
    """

    pairs: int
    letters: int = 12
    values: int = 24

    @property
    def vocabulary(self) -> int:
        return self.letters + self.values

    @property
    def length(self) -> int:
        return 2 * self.pairs * (3 + 2)

    def sample(self, number: int, random: Generator) -> tuple[Tensor, Tensor]:
        both = torch.combinations(torch.arange(self.letters))
        pair = both[permutations(number, len(both), random)[:, : self.pairs]]  # [number, pairs, 2]
        ordered = torch.cat([pair, pair.flip(2)], dim=1)
        values = self.letters + permutations(number, self.values, random)[:, : 2 * self.pairs]
        facts = torch.cat([ordered, values[..., None]], dim=2)  # [number, 2 * pairs, 3]
        stated, asked = (
            facts.take_along_dim(permutations(number, 2 * self.pairs, random)[..., None], dim=1) for _ in range(2)
        )
        tokens = torch.cat([stated.flatten(1), asked[..., :2].flatten(1)], dim=1)
        return tokens, asked_at(tokens, slice(6 * self.pairs + 1, None, 2), asked[..., 2])


@dataclass(frozen=True)
class SelectiveCopy:
    """Repeat the letters between the noise in order (selective copying; Mamba, arXiv 2312.00752, section 3.1)."""

    letters: int
    space: int
    alphabet: int = 16

    @property
    def vocabulary(self) -> int:
        return self.alphabet + 2

    @property
    def length(self) -> int:
        return self.space + self.letters

    def sample(self, number: int, random: Generator) -> tuple[Tensor, Tensor]:
        """Noise is one token, and a token of its own asks for each letter."""
        places = permutations(number, self.space, random)[:, : self.letters].sort(dim=1).values
        letters = torch.randint(self.alphabet, (number, self.letters), generator=random)
        text = torch.full((number, self.space), self.alphabet).scatter(1, places, letters)
        questions = torch.full((number, self.letters), self.alphabet + 1)
        tokens = torch.cat([text, questions], dim=1)
        return tokens, asked_at(tokens, slice(self.space, None), letters)


TASKS: dict[str, Task] = {
    "recall-12": Recall(12),
    "selective-copy-4": SelectiveCopy(4, 12, alphabet=8),
    "ordered-match-2": OrderedMatch(2, letters=6, values=8),
    "find-block-3": FindBlock(3, letters=8),
}
# For three layers: two do not lead two steps far.
DEEPER: dict[str, Task] = {"hops-4": Hops(4)}
# For four layers of width 256, with more to keep in mind.
LARGE: dict[str, Task] = {
    "recall-32": Recall(32, values=64),
    "recall-64": Recall(64, values=128),
    "hops-16": Hops(16),
    "find-block-20": FindBlock(20, size=5, letters=40),
    "ordered-match-12": OrderedMatch(12, letters=20, values=48),
    "selective-copy-16": SelectiveCopy(16, 240),
}
