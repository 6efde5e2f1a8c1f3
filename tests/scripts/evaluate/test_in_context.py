"""The 74 forms of in-context question: against the shapes of the published ones, and against a reader of their text."""

import json
import random
import re
from collections import Counter

import pytest
from cases.golden import GOLDEN
from lm_eval.tasks import TaskManager

from dynattn.scripts.evaluate.catalog import TaskCatalog
from dynattn.scripts.evaluate.chance_levels import chances_of
from dynattn.scripts.evaluate.in_context import load_dataset
from dynattn.scripts.evaluate.in_context_forms import (
    ABILITIES,
    CITIES,
    FAMILIES,
    FORMS,
    ITEMS_OF_A_FORM,
    ODD_ONE_OUT,
    TIMES,
    Item,
    Thing,
    _alike,
    draw_about_same_facts,
    generate,
)
from dynattn.scripts.evaluate.suites import SUITES, TASKS
from dynattn.scripts.evaluate.synthetic import OPPOSITES, PEOPLE, THINGS

TABLES = (THINGS, CITIES, ABILITIES)
RELATED = {name: related for table in TABLES for related, names in table.items() for name in names}
RELATED |= {adjective: opposite for pair in OPPOSITES for adjective, opposite in (pair, pair[::-1])}
TIMES_IN_ORDER = [times for _, times in TIMES.values()]
WORDS = {*RELATED, *RELATED.values(), *(time for times in TIMES_IN_ORDER for time in times)}
LONGEST_FIRST = sorted(map(re.escape, WORDS | set(map(str.capitalize, WORDS))), key=len, reverse=True)
ANY_WORD = re.compile(rf"(?<![\w-])(?:an? )?({'|'.join(LONGEST_FIRST)})(?!\w)")
ANYBODY = re.compile(rf"\b({'|'.join(PEOPLE)})\b")


def skeleton(item: Item) -> str:
    """The item with its answer, people as P and things as T."""
    return ANY_WORD.sub("T", ANYBODY.sub("P", f"{item.text} {item.choices[item.label]}"))


def related_to(name: str, wording: str) -> str:
    """What a question with this wording asks about a thing."""
    if "just " not in wording:
        return RELATED[name]
    times = next(times for times in TIMES_IN_ORDER if name in times[1:-1])
    return times[times.index(name, 1) + (1 if "before" in wording else -1)]


def solve(text: str) -> set[str]:
    """Reads the text alone: everybody and everything that answers the question."""
    if text.startswith("There are"):
        listed, question = re.fullmatch(r"There are (.*)\. Which (.*)", text).groups()
        things = [re.sub("^an? ", "", thing) for thing in listed.split(", ")]
        odd = next(thing for thing in things if things.count(thing) == 1)
        return {odd if re.search(r"\?( The)?$", question) else related_to(odd, question)}
    stated, question = re.fullmatch(r"< (.*) >\. (.*)", text).groups()
    names = {word.lower(): word for word in WORDS}
    facts = [
        (ANYBODY.search(fact)[0], names[ANY_WORD.search(ANYBODY.sub("", fact))[1].lower()])
        for fact in stated.split(". ")
    ]
    denied = " not " in question
    by_relation = any(wording.relation.split("{")[0] in question for wording in FAMILIES.values())
    value = {thing: related_to(thing, question) if by_relation else thing for _, thing in facts}
    if question.startswith("Who"):
        asked = max((word for word in WORDS if re.search(rf" {re.escape(word)}\?$", question)), key=len)
        return {person for person, thing in facts if (value[thing] == asked) is not denied}
    named = ANYBODY.search(question)[0]
    return {value[thing] for person, thing in facts if (person == named) is not denied}


VERBS = sorted({verb for wording in FAMILIES.values() for verb in wording.says + wording.denies}, key=len, reverse=True)


def without_verb(text: str) -> str:
    """With the same verb for all that mean the same, because the published file drew some of them only."""
    return re.sub(rf"\b({'|'.join(VERBS)})\b", lambda match: "does not" if " not" in match[0] else "does", text)


def test_every_form_has_the_shapes_of_the_published_task_of_its_number():
    published = json.loads((GOLDEN / "in_context_forms.json").read_text(encoding="utf-8"))
    assert len(published) == len(FORMS) == 74
    for number, skeletons in enumerate(published):
        ours = {without_verb(skeleton(item)) for item in generate(number)}
        assert ours <= set(map(without_verb, skeletons)), number


def test_a_reader_of_the_text_finds_exactly_the_right_answer():
    for number in range(len(FORMS)):
        for item in generate(number):
            assert {choice for choice in item.choices if choice in solve(item.text)} == {item.choices[item.label]}


@pytest.mark.parametrize("number", range(len(FORMS)))
def test_items_about_the_same_facts_ask_for_each_of_them_in_any_order(number: int):
    rng = random.Random(0)
    first_places: dict[int, set[int]] = {}
    for _ in range(100):
        items = draw_about_same_facts(rng, number)
        assert len({item.text.split(">.")[0] for item in items}) == 1
        assert all(item.choices[item.label] in solve(item.text) for item in items)
        if len(items) > 1:
            assert sorted(item.label for item in items) == [0, 1, 2]
            # Were the order drawn with the same numbers as the facts, the first name would tell it.
            third = 3 * PEOPLE.index(ANYBODY.search(items[0].text)[0]) // len(PEOPLE)
            first_places.setdefault(third, set()).add(items[0].label)
    assert all(places == {0, 1, 2} for places in first_places.values())
    assert bool(first_places) is not (FORMS[number].denied or FORMS[number].family == ODD_ONE_OUT)


def test_a_question_about_kinds_has_other_things_of_a_kind():
    """A model that looks for the same word twice would answer it otherwise."""
    for form in (form for form in FORMS if form.words == "possession" and form.family != ODD_ONE_OUT):
        drawn = {_alike(random.Random(seed), form, Thing("drill", "tool")).name for seed in range(25)}
        assert drawn == ({*THINGS["tool"]} - {"drill"} if form.by_relation else {"drill"})


def test_no_place_is_right_more_often_than_another():
    for number, form in enumerate(FORMS):
        items = generate(number)
        assert items == generate(number)
        assert len({item.text for item in items}) == ITEMS_OF_A_FORM
        choices = 2 if form.family == "odd_one_out" else 3
        assert all(len(set(item.choices)) == choices for item in items)
        if choices == 3:
            assert set(Counter(item.label for item in items).values()) == {ITEMS_OF_A_FORM // 3}


def test_items_stay_the_same_so_that_scores_of_different_days_compare():
    text = "There are 2003, 2003, 1994. Which is different? The year just after"
    assert Item(73, text, ("2002", "1993"), 1) in generate(73)
    text = "< Owen arrived in 1997. Hugo arrived in 1995. Owen arrived in 2001. >. "
    text += "Owen did not appear the year just before"
    assert Item(48, text, ("1998", "1996", "2002"), 1) in generate(48)


def test_the_suite_has_all_families_and_tells_chance():
    loaded, missing = TaskCatalog(SUITES["dcformer"]).load()
    tasks = loaded["tasks"].values()
    assert missing == {}
    assert sum(len(task.eval_docs) for task in tasks) == 74 * ITEMS_OF_A_FORM
    families = Counter(form.family for form in FORMS)
    for task in tasks:
        family = task.task_name.removeprefix("dcformer_")
        assert len(task.eval_docs) == ITEMS_OF_A_FORM * families.pop(family)
        chance = sum(1 / len(doc["choices"]) for doc in task.eval_docs) / len(task.eval_docs)
        assert task.config.metadata["chance"] == pytest.approx(chance, abs=1e-4)
    assert not families
    assert loaded["groups"]["dcformer_in_context"].metadata["chance"] == pytest.approx((56 / 3 + 18 / 2) / 74, abs=1e-4)


@pytest.mark.parametrize("limit", [1, 5, 24, 300, 10**6])
def test_chance_is_that_of_the_documents_that_are_scored(limit: int):
    """In the first ones a group has another share of questions with two choices, or a task of those with four."""
    for suite, group in (("dcformer", "dcformer_in_context"), ("builtin", "dynattn_synthetic")):
        loaded, _ = TaskCatalog([group]).load()
        assert group in SUITES[suite]
        parts = {name: [1 / len(doc["choices"]) for doc in t.eval_docs][:limit] for name, t in loaded["tasks"].items()}
        parts[group] = [chance for part in parts.values() for chance in part]
        assert chances_of(loaded, limit) == pytest.approx({k: sum(v) / len(v) for k, v in parts.items()}, abs=1e-4)


def test_examples_are_other_questions_of_the_same_form():
    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    task = manager.load(["dcformer_opposite"])["tasks"]["dcformer_opposite"]
    for doc in list(task.eval_docs)[::20]:
        task.set_fewshot_seed(3)
        lines = task.fewshot_context(doc, 5).split("\n")
        assert len(set(lines)) == 6 and lines[-1] == doc["text"]
        forms = [skeleton(Item(doc["form"], line, ("",), 0)).strip() for line in lines]
        assert {form.removesuffix(" T").removesuffix(" P") for form in forms} == {
            forms[-1].removesuffix(" T").removesuffix(" P")
        }


def test_unknown_family():
    with pytest.raises(ValueError, match="there is no family 'riddle'; choose from possession, city"):
        load_dataset("riddle")
