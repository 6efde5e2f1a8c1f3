"""The 74 forms of in-context question on which the DCFormer paper looks into composed heads, by family.

The forms are those of `data/synthetic_dataset.jsonl` in github.com/Caiyun-AI/DCFormer, which the paper's section on
synthetic tasks evaluates: a form fixes what is stated, in which order, and what is asked. Items are drawn anew with
words of our own, so no line of that file is repeated; the number of a form is that of its task there. Three facts about
three things stand between angle brackets, or three things in a row. The question names a person or a thing, says or
denies ("does not have"), and asks for the person, the thing, or what the thing is related to: its kind, its country,
what it can do, its opposite, what comes after it. Few-shot examples are always of the same form, so that a model can
tell from the context what is asked.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from datasets import Dataset, DatasetDict
from lm_eval.api.samplers import ContextSampler

from .synthetic import OPPOSITES, PEOPLE, THINGS

SEED = 20240516
ITEMS_OF_A_FORM, THREE = 24, 3

# fmt: off
CITIES = {
    "Norway": ("Oslo", "Bergen", "Tromso"), "Poland": ("Warsaw", "Krakow", "Gdansk"),
    "Egypt": ("Cairo", "Luxor", "Aswan"), "Peru": ("Lima", "Cusco", "Arequipa"),
    "Vietnam": ("Hanoi", "Hue", "Saigon"), "Kenya": ("Nairobi", "Mombasa", "Kisumu"),
    "Greece": ("Athens", "Patras", "Corinth"), "Morocco": ("Rabat", "Fez", "Marrakesh"),
}
ABILITIES = {
    "cut": ("knife", "saw", "razor"), "write": ("pencil", "pen", "typewriter"),
    "fly": ("plane", "glider", "helicopter"), "cook": ("stove", "kettle", "pan"),
    "clean": ("broom", "mop", "sponge"), "measure": ("ruler", "scale", "thermometer"),
    "shine": ("lamp", "candle", "torch"), "float": ("boat", "raft", "buoy"),
}
# Times in their order, with the preposition in front of them; the first and the last are only asked for.
TIMES: Mapping[str, tuple[str, Sequence[str]]] = {
    "day": ("on", ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday", "Monday")),
    "month": ("in", ("December", "January", "February", "March", "April", "May", "June", "July", "August", "September",
                     "October", "November", "December", "January")),
    "season": ("in", ("winter", "spring", "summer", "autumn", "winter", "spring")),
    "year": ("in", tuple(str(year) for year in range(1988, 2009))),
    "time": ("at", tuple(f"{hour} o'clock" for hour in (12, *range(1, 13), 1))),
}
# fmt: on


@dataclass(frozen=True)
class Thing:
    """What facts are about.

    Attributes:
        related: what a question asks for beside the thing: its kind, country, use, opposite, or the next time.
        before: the time before it; empty for what is no time.
        unit: what kind of time it is, which replaces `{unit}` in a wording; empty for what is no time.
        preposition: replaces `{at}` in a wording.
    """

    name: str
    related: str
    before: str = ""
    unit: str = ""
    preposition: str = ""


@dataclass(frozen=True)
class Wording:
    """How a family states and asks.

    Attributes:
        facts: the statement with the person first, and with the thing first.
        says, denies: what stands between the person and the thing in a question; each item takes one.
        relation: what stands in front of `Thing.related`.
        by_name: whether there are also questions about the thing itself.
        listed: a thing in a row of things.
        odd, odd_relation: what asks for the odd thing itself, None if nothing does, and for what it is related to.
    """

    facts: tuple[str, str]
    says: tuple[str, ...]
    denies: tuple[str, ...]
    relation: str
    odd_relation: str
    by_name: bool = False
    listed: str = "{thing}"
    odd: str | None = None


HAS = ("{person} has a {thing}.", "The {thing} is {person}'s.")
OWNS, OWNS_NOT = ("has", "owns", "possesses"), ("does not have", "does not own", "does not possess")
FAMILIES = {
    "possession": Wording(HAS, OWNS, OWNS_NOT, "a kind of", "A kind of", by_name=True, listed="a {thing}", odd="The"),
    "city": Wording(
        ("{person} likes {thing}.", "{thing} attracts {person}."),
        ("wants to visit", "wants to go to", "longs for", "yearns for"),
        ("does not want to visit", "does not want to go to", "does not long for", "does not yearn for"),
        "the city in",
        "The city in",
        by_name=True,
        odd="",
    ),
    "ability": Wording(
        HAS, OWNS, OWNS_NOT, "the thing that can", "The thing that can", listed="a {thing}", odd="The"
    ),
    "opposite": Wording(
        ("{person} is {thing}.", "{Thing} {person}."), ("is",), ("is not",), "the opposite of", "The opposite of"
    ),
    "time": Wording(
        ("{person} arrived {at} {thing}.", "{At} {thing} arrived {person}."),
        ("arrived", "appeared", "showed up"),
        ("did not arrive", "did not appear", "did not show up"),
        "the {unit} just before",
        "The {unit} just before",
    ),
}  # fmt: skip
ODD_ONE_OUT = "odd_one_out"


@dataclass(frozen=True)
class Form:
    """One way to state and ask.

    Attributes:
        family: what items are grouped by.
        words: the family whose wording and things it takes.
        by_relation: whether the question is about what a thing is related to, not the thing itself.
        who: whether it asks for the person, not the thing.
        denied: whether it denies; an odd one out is then told as "not" the other thing, instead of "different".
        thing_first: whether facts begin with the thing.
        after: whether the odd time is asked for as the one after another.
    """

    family: str
    words: str
    by_relation: bool
    denied: bool
    who: bool = False
    thing_first: bool = False
    after: bool = False


@dataclass(frozen=True)
class Item:
    """One question: `choices[label]` continues `text`; `form` is the number of its form."""

    form: int
    text: str
    choices: tuple[str, ...]
    label: int


def list_forms() -> tuple[Form, ...]:
    """All forms, in the order of the tasks of the published file."""
    stated = [
        Form(family, family, by_relation, denied, who, thing_first)
        for family, wording in FAMILIES.items()
        for by_relation in ((True, False) if wording.by_name else (True,))
        for who, denied, thing_first in product((False, True), (True, False), (False, True))
    ]
    rows = [
        Form(ODD_ONE_OUT, family, by_relation, denied)
        for family, wording in FAMILIES.items()
        if family != "time"
        for by_relation in ((True,) if wording.odd is None else (False, True))
        for denied in (True, False)
    ]
    times = [
        Form(ODD_ONE_OUT, "time", by_relation=True, denied=denied, after=after)
        for after, denied in product((False, True), (True, False))
    ]
    return (*stated, *rows, *times)


FORMS = list_forms()


class SameForm(ContextSampler):
    """Draws the few-shot examples of a question from the other questions of its form.

    lm-eval tells a sampler the question only where examples come from the split that is scored, so there is one split.
    """

    def sample(
        self, n: int, eval_doc: dict[str, Any] | None = None, df: Sequence[dict[str, Any]] | None = None, **_: Any
    ) -> Sequence[dict[str, Any]]:
        if eval_doc is None:
            raise ValueError("examples of the same form need a question; let fewshot_split be the test_split")
        pool = [doc for doc in df or self.fewshot_docs() if doc["form"] == eval_doc["form"] and doc != eval_doc]
        return self.rnd.sample(pool, n)


def load_dataset(family: str, **_: object) -> DatasetDict:
    """Builds the split "test" of a family, which is also where few-shot examples come from; lm-eval calls it.

    Raises:
        ValueError: there is no such family.
    """
    items = [item for number, form in enumerate(FORMS) if form.family == family for item in generate(number)]
    if not items:
        families = ", ".join(dict.fromkeys(form.family for form in FORMS))
        raise ValueError(f"there is no family {family!r}; choose from {families}")
    return DatasetDict(test=Dataset.from_list([asdict(item) for item in items]))


def generate(number: int) -> list[Item]:
    """Returns `ITEMS_OF_A_FORM` different items of a form, the same ones on every machine.

    What is asked for stands at each of the three places equally often.
    """
    rng, form = random.Random(f"{SEED} {number}"), FORMS[number]
    draw = draw_odd_one if form.family == ODD_ONE_OUT else draw_stated
    items: dict[str, Item] = {}
    while len(items) < ITEMS_OF_A_FORM:
        text, choices, label = draw(rng, form, len(items) % THREE)
        items.setdefault(text, Item(number, text, tuple(choices), label))
    return list(items.values())


def draw_stated(rng: random.Random, form: Form, place: int) -> tuple[str, list[str], int]:
    """Three facts and a question whose answer is in the fact at `place`: text, choices, and which one is right."""
    wording = FAMILIES[form.words]
    people, things = _draw_facts(rng, form, place)
    pattern = wording.facts[form.thing_first]
    facts = " ".join(_fill(pattern, thing, person) for person, thing in zip(people, things, strict=True))
    verb = rng.choice(wording.denies if form.denied else wording.says)
    # A denied question names what the others have, or one who has all but this.
    named = (place + 1) % THREE if form.denied else place
    asked = " ".join([verb, *([_fill(wording.relation, things[named])] if form.by_relation else [])])
    answers = [thing.related if form.by_relation else thing.name for thing in things]
    if form.who:
        return f"< {facts} >. Who {asked} {answers[named]}?", people, place
    return f"< {facts} >. {people[named]} {asked}", answers, place


def _draw_facts(rng: random.Random, form: Form, place: int) -> tuple[list[str], list[Thing]]:
    """People and things of three facts; in a denied question the fact at `place` differs from the two others.

    "Who does not" is asked of three people, two of whom have the same, or the same kind of, thing. "Does not have" is
    asked of a person who has two of the things.
    """
    people, things = rng.sample(PEOPLE, THREE), draw_things(rng, form.words, THREE)
    if not form.denied:
        return people, things
    first, second = (index for index in range(THREE) if index != place)
    if form.who:
        things[second] = _alike(rng, form, things[first])
    else:
        people[second] = people[first]
    return people, things


def _alike(rng: random.Random, form: Form, thing: Thing) -> Thing:
    """Another thing of the same kind where the family has some and the question is about them; else the same."""
    same = [other for other in _all_things(form.words, thing.unit) if other.related == thing.related]
    return rng.choice([other for other in same if other != thing] or same) if form.by_relation else thing


def draw_odd_one(rng: random.Random, form: Form, place: int) -> tuple[str, list[str], int]:
    """Three things, two of them the same, and a question about the one at `place`: text, choices, the right one."""
    wording = FAMILIES[form.words]
    odd, other = draw_things(rng, form.words, 2)
    row = [odd if index == place else other for index in range(THREE)]
    listed = ", ".join(_fill(wording.listed, thing) for thing in row)
    asked = f"Which is not {other.name}?" if form.denied else "Which is different?"
    start = _fill(wording.odd_relation, odd) if form.by_relation else wording.odd
    start = start.replace("before", "after") if form.after and start else start
    names = [
        (thing.before if form.after else thing.related) if form.by_relation else thing.name for thing in (odd, other)
    ]
    label = rng.randrange(2)
    choices = names if label == 0 else names[::-1]
    return " ".join(part for part in (f"There are {listed}.", asked, start) if part), choices, label


def draw_things(rng: random.Random, words: str, number: int) -> list[Thing]:
    """Draws things of which no two are related to the same."""
    unit = rng.choice(sorted(TIMES)) if words == "time" else ""
    things: list[Thing] = []
    for thing in rng.sample(pool := _all_things(words, unit), len(pool)):
        if len(things) < number and thing.related not in {one.related for one in things}:
            things.append(thing)
    return things


def _all_things(words: str, unit: str) -> list[Thing]:
    if words == "time":
        preposition, times = TIMES[unit]
        neighbours = zip(times, times[1:], times[2:], strict=False)
        return [Thing(time, after, before, unit, preposition) for before, time, after in neighbours]
    if words == "opposite":
        return [Thing(*pair) for first, second in OPPOSITES for pair in ((first, second), (second, first))]
    tables: Mapping[str, Mapping[str, Sequence[str]]] = {"possession": THINGS, "city": CITIES, "ability": ABILITIES}
    return [Thing(name, related) for related, names in tables[words].items() for name in names]


def _fill(pattern: str, thing: Thing, person: str = "") -> str:
    return pattern.format(
        person=person, thing=thing.name, Thing=thing.name.capitalize(), unit=thing.unit,
        at=thing.preposition, At=thing.preposition.capitalize(),
    )  # fmt: skip
