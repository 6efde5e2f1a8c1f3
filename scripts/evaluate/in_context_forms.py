"""In-context questions of the 74 forms of the DCFormer paper, grouped into families.

The forms are those of `data/synthetic_dataset.jsonl` in github.com/Caiyun-AI/DCFormer, which the paper's section on
synthetic tasks evaluates: a form fixes what is stated, in which order, and what is asked. The number of a form is that
of its task in that file. The items are drawn from other words, so no line of that file is repeated.

An item states three facts about three things between angle brackets, or lists three things. Its question names a
person or a thing, affirms or denies ("does not have"), and asks for the person, the thing, or what the thing is related
to: its kind, its country, what it can do, its opposite, what comes after it. Few-shot examples are always of the same
form, so that a model can tell from the context what is asked.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from .synthetic import OPPOSITES, PEOPLE, THINGS

SEED = 20240516
ITEMS_OF_A_FORM = 24
FACTS = 3  # of an item, or things that it lists; the answer is at one of them

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
# Times in their order, and their preposition. The first and the last are answers only, as they lack a neighbour.
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
    """A thing that facts are about.

    Attributes:
        related: what a question may ask for instead of the thing: its kind, country, use, opposite, or the next time.
        before: the time before it; empty for a thing that is not a time.
        unit: the kind of time, which replaces `{unit}` in a wording; empty for a thing that is not a time.
        preposition: replaces `{at}` in a wording.
    """

    name: str
    related: str
    before: str = ""
    unit: str = ""
    preposition: str = ""


@dataclass(frozen=True)
class Wording:
    """The wording of statements and questions of a family.

    Attributes:
        facts: the statement with the person first, and with the thing first.
        says, denies: verbs between person and thing in a question that affirms or denies; each item has one of them.
        relation: the words in front of `Thing.related`; capitalized, they begin what is said of an odd one.
        by_name: whether there are also questions about the thing itself.
        listed: a thing in a list of things.
        odd: the words that ask for the odd one of three things; None if no form does.
    """

    facts: tuple[str, str]
    says: tuple[str, ...]
    denies: tuple[str, ...]
    relation: str
    by_name: bool = False
    listed: str = "{thing}"
    odd: str | None = None


HAS = ("{person} has a {thing}.", "The {thing} is {person}'s.")
OWNS, OWNS_NOT = ("has", "owns", "possesses"), ("does not have", "does not own", "does not possess")
FAMILIES = {
    "possession": Wording(HAS, OWNS, OWNS_NOT, "a kind of", by_name=True, listed="a {thing}", odd="The"),
    "city": Wording(
        ("{person} likes {thing}.", "{thing} attracts {person}."),
        ("wants to visit", "wants to go to", "longs for", "yearns for"),
        ("does not want to visit", "does not want to go to", "does not long for", "does not yearn for"),
        "the city in",
        by_name=True,
        odd="",
    ),
    "ability": Wording(HAS, OWNS, OWNS_NOT, "the thing that can", listed="a {thing}", odd="The"),
    "opposite": Wording(("{person} is {thing}.", "{Thing} {person}."), ("is",), ("is not",), "the opposite of"),
    "time": Wording(
        ("{person} arrived {at} {thing}.", "{At} {thing} arrived {person}."),
        ("arrived", "appeared", "showed up"),
        ("did not arrive", "did not appear", "did not show up"),
        "the {unit} just before",
    ),
}  # fmt: skip
ODD_ONE_OUT = "odd_one_out"


@dataclass(frozen=True)
class Form:
    """One way to state and ask.

    Attributes:
        family: the family, and so the lm-eval task, to which its items belong.
        words: the family whose wording and things it uses.
        by_relation: whether the question is about what a thing is related to, not the thing itself.
        who: whether it asks for the person, not the thing.
        denied: whether the question denies. For an odd one out it then asks "Which is not ...?" instead of "Which is
            different?".
        thing_first: whether facts begin with the thing.
        after: whether the odd time is described as the one after another time, instead of before.
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


def generate(number: int) -> list[Item]:
    """Returns `ITEMS_OF_A_FORM` different items of a form, the same ones on every machine.

    The answer is at each of the three places equally often.
    """
    rng = random.Random(f"{SEED} {number}")
    items: dict[str, Item] = {}
    while len(items) < ITEMS_OF_A_FORM:
        item = draw_item(rng, number, len(items) % FACTS)
        items.setdefault(item.text, item)
    return list(items.values())


def draw_item(rng: random.Random, number: int, place: int) -> Item:
    """Draws an item of a form whose answer is at `place`: 0, 1 or 2."""
    form = FORMS[number]
    draw = draw_odd_one if form.family == ODD_ONE_OUT else draw_stated
    text, choices, label = draw(rng, form, place)
    return Item(number, text, tuple(choices), label)


def draw_about_same_facts(rng: random.Random, number: int) -> list[Item]:
    """Draws items of a form that state the same facts, in any order: one for each fact if its questions affirm.

    Questions that deny and questions for the odd one of three things need facts of their own, so each is drawn alone.
    """
    seed, form = rng.random(), FORMS[number]
    places = rng.sample(range(FACTS), FACTS)
    alone = form.denied or form.family == ODD_ONE_OUT
    return [draw_item(random.Random(seed), number, place) for place in (places[:1] if alone else places)]


def draw_stated(rng: random.Random, form: Form, place: int) -> tuple[str, list[str], int]:
    """Three facts and a question whose answer is in the fact at `place`: text, choices, and which one is right."""
    wording = FAMILIES[form.words]
    people, things = _draw_facts(rng, form, place)
    pattern = wording.facts[form.thing_first]
    facts = " ".join(_fill(pattern, thing, person) for person, thing in zip(people, things, strict=True))
    verb = rng.choice(wording.denies if form.denied else wording.says)
    # A question that denies names what the two others have, or the person who has all but the thing at `place`.
    named = (place + 1) % FACTS if form.denied else place
    asked = " ".join([verb, *([_fill(wording.relation, things[named])] if form.by_relation else [])])
    answers = [thing.related if form.by_relation else thing.name for thing in things]
    if form.who:
        return f"< {facts} >. Who {asked} {answers[named]}?", people, place
    return f"< {facts} >. {people[named]} {asked}", answers, place


def _draw_facts(rng: random.Random, form: Form, place: int) -> tuple[list[str], list[Thing]]:
    """People and things of three facts; for a question that denies, the fact at `place` differs from the two others.

    For "Who does not have ...?" two of three people have the same thing, or things of the same kind. For "... does not
    have" a person has two of the three things.
    """
    people, things = rng.sample(PEOPLE, FACTS), draw_things(rng, form.words, FACTS)
    if not form.denied:
        return people, things
    first, second = (index for index in range(FACTS) if index != place)
    if form.who:
        things[second] = _alike(rng, form, things[first])
    else:
        people[second] = people[first]
    return people, things


def _alike(rng: random.Random, form: Form, thing: Thing) -> Thing:
    """Another thing of the same kind if the question is about kinds and the family has another; else the same thing."""
    same = [other for other in _all_things(form.words, thing.unit) if other.related == thing.related]
    return rng.choice([other for other in same if other != thing] or same) if form.by_relation else thing


def draw_odd_one(rng: random.Random, form: Form, place: int) -> tuple[str, list[str], int]:
    """Three things, two of them the same, and a question about the one at `place`: text, choices, label."""
    wording = FAMILIES[form.words]
    odd, other = draw_things(rng, form.words, 2)
    row = [odd if index == place else other for index in range(FACTS)]
    listed = ", ".join(_fill(wording.listed, thing) for thing in row)
    asked = f"Which is not {other.name}?" if form.denied else "Which is different?"
    start = _fill(wording.relation.capitalize(), odd) if form.by_relation else wording.odd
    start = start.replace("before", "after") if form.after and start else start
    names = [
        (thing.before if form.after else thing.related) if form.by_relation else thing.name for thing in (odd, other)
    ]
    label = rng.randrange(2)
    choices = names if label == 0 else names[::-1]
    return " ".join(part for part in (f"There are {listed}.", asked, start) if part), choices, label


def draw_things(rng: random.Random, words: str, number: int) -> list[Thing]:
    """Draws `number` things that are all related to something different."""
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
