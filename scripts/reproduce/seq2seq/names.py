"""Names of countries, regions and languages in English and Ukrainian, from the catalogues that `pycountry` ships."""

import gettext
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal
from zlib import crc32

from ...common.errors import UserError
from .pairs import FIRST_TOKEN, Batch, make_batch

LANGUAGE = "uk"
# Attributes of the package, and the catalogues of their names.
CATALOGUES = {
    "countries": "iso3166-1",
    "historic_countries": "iso3166-3",
    "subdivisions": "iso3166-2",
    "languages": "iso639-3",
    "language_families": "iso639-5",
    "scripts": "iso15924",
    "currencies": "iso4217",
}
# One of so many names is tested on, and another one chooses learning rates.
SHARE = 10

Part = Literal["train", "validation", "test"]
Pair = tuple[str, str]


@dataclass(frozen=True)
class Names:
    """Pairs of names, and the characters of all of them as tokens."""

    pairs: tuple[Pair, ...]

    @cached_property
    def characters(self) -> str:
        """Every character, whose place plus `FIRST_TOKEN` is its token."""
        return "".join(sorted({character for pair in self.pairs for name in pair for character in name}))

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""
        return FIRST_TOKEN + len(self.characters)

    def part(self, part: Part) -> list[Pair]:
        """The pairs of a part; which one a pair belongs to depends on its English name alone."""
        return [pair for pair in self.pairs if part_of(pair[0]) == part]

    def batch(self, pairs: Sequence[Pair]) -> Batch:
        """Pairs as tokens."""
        return make_batch([self.encode(source) for source, _ in pairs], [self.encode(target) for _, target in pairs])

    def encode(self, name: str) -> list[int]:
        """The tokens of a name."""
        return [FIRST_TOKEN + self.characters.index(character) for character in name]

    def decode(self, tokens: Sequence[int]) -> str:
        """The characters among the tokens, as a name."""
        return "".join(self.characters[token - FIRST_TOKEN] for token in tokens if token >= FIRST_TOKEN)


def part_of(name: str) -> Part:
    """The part that a name belongs to."""
    share = crc32(name.encode()) % SHARE
    return "test" if share == 0 else "validation" if share == 1 else "train"


def load_names(longest: int) -> Names:
    """All names that differ between the languages, none of them longer than `longest` in either.

    Raises:
        UserError: the package is missing.
    """
    try:
        import pycountry
    except ImportError as error:
        raise UserError("the names come with pycountry; install dynattn[studies], or leave out that task") from error
    pairs: dict[str, str] = {}
    for attribute, catalogue in CATALOGUES.items():
        translate = gettext.translation(catalogue, pycountry.LOCALES_DIR, [LANGUAGE]).gettext
        for entry in getattr(pycountry, attribute):
            pairs.setdefault(entry.name, translate(entry.name))
    short = ((source, target) for source, target in pairs.items() if max(len(source), len(target)) <= longest)
    return Names(tuple((source, target) for source, target in short if source != target))
