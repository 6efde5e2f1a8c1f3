"""A seeded multiple-choice suite on composing relations in context, after the synthetic tasks of the DCFormer paper.

Every item states two to four facts between angle brackets and asks about one of them; the candidates are drawn from the
facts. Answering needs one lookup, or several relations composed: the owner of a thing, its kind, "does not have",
opposites, a chain of two facts. Item `i` has `2 + i % 3` facts for each relation and as many candidates, and in every
36 items the answer is mentioned at each position equally often. So a model that always chooses the same position scores
`CHANCE`. A model that prefers certain words scores it on average. In the two kinds with negation a person owns all
things but one, which is the answer, so picking the odd one out solves them.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from datasets import Dataset, DatasetDict

SEED = 20240515
TEST_ITEMS = 144
TRAIN_ITEMS = 36
FACTS = (2, 3, 4)
CHANCE = sum(1 / facts for facts in FACTS) / len(FACTS)

# fmt: off
PEOPLE = (
    "Nora", "Owen", "Tess", "Hugo", "Maya", "Felix", "Greta", "Jonas", "Clara", "Ravi", "Lena", "Marco", "Priya",
    "Dylan", "Sofia", "Kofi", "Heidi", "Pablo", "Wendy", "Boris", "Yara", "Simon", "Tara", "Victor",
)
PLACES = (
    "cellar", "attic", "kitchen", "garden", "garage", "stable", "library", "tower", "barn", "harbor", "chapel",
    "market",
)
# One word each, none starting with a vowel sound: the article before an answer must not give it away.
THINGS = {
    "tool": ("hammer", "wrench", "chisel", "shovel", "drill", "rake"),
    "instrument": ("flute", "cello", "trumpet", "banjo", "harp", "drum"),
    "bird": ("raven", "falcon", "pigeon", "heron", "sparrow", "swan"),
    "vehicle": ("truck", "tram", "ferry", "scooter", "tractor", "canoe"),
    "furniture": ("chair", "table", "shelf", "sofa", "bench", "desk"),
    "vegetable": ("carrot", "turnip", "leek", "pepper", "radish", "cabbage"),
    "flower": ("tulip", "daisy", "rose", "lily", "poppy", "violet"),
    "gem": ("ruby", "diamond", "pearl", "topaz", "garnet", "sapphire"),
}
OPPOSITES = (
    ("early", "late"), ("noisy", "quiet"), ("young", "old"), ("strong", "weak"), ("wet", "dry"), ("hungry", "full"),
    ("fast", "slow"), ("tidy", "messy"), ("bold", "timid"), ("awake", "asleep"), ("cold", "hot"), ("right", "wrong"),
)
# fmt: on
# Questions about owners, and what they ask for.
OWNER_QUESTIONS = {
    "possession": ("{person} has a", "thing"),
    "owner": ("The {thing} belongs to", "person"),
    "kind_of": ("{person} has a kind of", "kind"),
    "kind_owner": ("Some kind of {kind} belongs to", "person"),
    "negation": ("{person} does not have a", "thing"),
    "kind_negation": ("{person} does not have a kind of", "kind"),
}


@dataclass(frozen=True)
class Item:
    """One question: `choices[label]` continues `text`; `facts` is the number of choices, and of facts per relation."""

    text: str
    choices: tuple[str, ...]
    label: int
    facts: int


def load_dataset(kind: str, **_: object) -> DatasetDict:
    """Builds the splits "train" (few-shot examples) and "test" of one kind of item; lm-eval calls it from the YAML.

    Raises:
        ValueError: there is no such kind.
    """
    items = generate(kind)
    splits = {"train": items[:TRAIN_ITEMS], "test": items[TRAIN_ITEMS:]}
    return DatasetDict({name: Dataset.from_list([asdict(item) for item in split]) for name, split in splits.items()})


def generate(kind: str) -> list[Item]:
    """Returns `TRAIN_ITEMS + TEST_ITEMS` different items of one kind, the same ones on every machine."""
    if kind not in BUILDERS:
        raise ValueError(f"there is no synthetic task {kind!r}; choose from {', '.join(BUILDERS)}")
    rng = random.Random(f"{SEED} {kind}")
    items: dict[str, Item] = {}
    while (index := len(items)) < TRAIN_ITEMS + TEST_ITEMS:
        facts = FACTS[index % len(FACTS)]
        item = BUILDERS[kind](rng, facts, index // len(FACTS) % facts)
        items.setdefault(item.text, item)
    return list(items.values())


def ask_about_owners(kind: str, rng: random.Random, facts: int, answer: int) -> Item:
    """An item about owners, things and their kinds, with one of `OWNER_QUESTIONS`.

    With negation, one person has everything but the answer, which another one has; the question names the first.
    """
    question, asked = OWNER_QUESTIONS[kind]
    people, things, kinds = _draw(rng, facts)
    person = people[answer]
    if kind in ("negation", "kind_negation"):
        person, other = people[:2]
        people = [other if position == answer else person for position in range(facts)]
    text = question.format(person=person, thing=things[answer], kind=kinds[answer])
    return _item(_has(people, things), text, {"person": people, "thing": things, "kind": kinds}[asked], answer)


def opposite(rng: random.Random, facts: int, answer: int) -> Item:
    """Person to property to its opposite."""
    people = rng.sample(PEOPLE, facts)
    pairs = [rng.sample(pair, 2) for pair in rng.sample(OPPOSITES, facts)]
    stated = [f"{person} is {said}." for person, (said, _) in zip(people, pairs, strict=True)]
    return _item(stated, f"{people[answer]} is the opposite of", [unsaid for _, unsaid in pairs], answer)


def two_step(rng: random.Random, facts: int, answer: int) -> Item:
    """Owner to thing to place, through two stated relations in independent orders."""
    people, things, _ = _draw(rng, facts)
    places = rng.sample(PLACES, facts)
    order = rng.sample(range(facts), facts)
    located = [f"The {things[i]} is in the {place}." for i, place in zip(order, places, strict=True)]
    question = f"What {people[order[answer]]} has is in the"
    return _item(_has(people, things) + located, question, places, answer)


BUILDERS: dict[str, Callable[[random.Random, int, int], Item]] = {
    **{kind: partial(ask_about_owners, kind) for kind in OWNER_QUESTIONS},
    "opposite": opposite,
    "two_step": two_step,
}


def _draw(rng: random.Random, facts: int) -> tuple[list[str], list[str], list[str]]:
    """Draws different people, and things of different kinds with these kinds."""
    kinds = rng.sample(sorted(THINGS), facts)
    return rng.sample(PEOPLE, facts), [rng.choice(THINGS[kind]) for kind in kinds], kinds


def _has(people: Sequence[str], things: Sequence[str]) -> list[str]:
    return [f"{person} has a {thing}." for person, thing in zip(people, things, strict=True)]


def _item(stated: Sequence[str], question: str, choices: Sequence[str], answer: int) -> Item:
    return Item(f"< {' '.join(stated)} > {question}", tuple(choices), answer, len(choices))
