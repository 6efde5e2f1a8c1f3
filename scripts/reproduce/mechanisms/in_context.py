"""The in-context questions of the DCFormer paper as tasks to train on, one for each of their six families."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from random import Random

import torch
from torch import Generator, Tensor

from ...evaluate.in_context_forms import FORMS, draw_about_same_facts
from .tasks import IGNORED

WORD = re.compile(r"o'clock|\w+|\S")
END_OF_FACTS = ">."
# How often each form is drawn to collect its words: twice as often as it takes until no new word appears.
DRAWINGS = 600


@dataclass(frozen=True)
class InContext:
    """Questions about three facts or three things (DCFormer, arXiv 2405.08553, section on synthetic tasks).

    A sequence holds as many facts as fit, all in one form of the family, which is drawn at random. Behind them stand
    the questions that they answer, each with its answer; earlier ones are examples for later ones, as in the paper.
    Tokens are words, and each question asks for the first word of its answer. Where a form names a relation, such as
    "a kind of", the model must also learn the kinds of all things, which no sequence states.
    """

    family: str
    length: int = 64

    @property
    def vocabulary(self) -> int:
        return 1 + len(self.words)

    @property
    def forms(self) -> list[int]:
        """The numbers of the family's forms."""
        return [number for number, form in enumerate(FORMS) if form.family == self.family]

    @cached_property
    def words(self) -> dict[str, int]:
        """The tokens of all words of the family; token 0 is padding."""
        rng = Random(0)
        drawn = (words for form in self.forms for _ in range(DRAWINGS) for words in questions(rng, form))
        return {word: token for token, word in enumerate(sorted({word for words in drawn for word in words}), start=1)}

    def sample(self, number: int, random: Generator) -> tuple[Tensor, Tensor]:
        """Sequences end with padding where the next question does not fit."""
        rng = Random(int(torch.randint(2**62, (), generator=random)))
        tokens = torch.zeros(number, self.length, dtype=torch.long)
        targets = torch.full_like(tokens, IGNORED)
        for row, asked in zip(tokens, targets, strict=True):
            end = 0
            for words in self._as_many_as_fit(rng):
                begin, end = end, end + len(words)
                row[begin:end] = torch.tensor([self.words[word] for word in words])
                asked[end - 2] = row[end - 1]
        return tokens, targets

    def _as_many_as_fit(self, rng: Random) -> Iterator[list[str]]:
        """The questions of a sequence, all of one form."""
        form, left = rng.choice(self.forms), self.length
        while True:
            for words in questions(rng, form):
                left -= len(words)
                if left < 0:
                    return
                yield words


def questions(rng: Random, form: int) -> Iterator[list[str]]:
    """The words of a form's questions about the same facts, each with its answer; the facts stand before the first."""
    for number, item in enumerate(draw_about_same_facts(rng, form)):
        text = item.text if number == 0 else item.text.rpartition(END_OF_FACTS)[2]
        yield [*WORD.findall(text), WORD.findall(item.choices[item.label])[0]]


_FAMILIES = dict.fromkeys(form.family for form in FORMS)
IN_CONTEXT = {f"in-context-{family.replace('_', '-')}": InContext(family) for family in _FAMILIES}
