import re
from collections import Counter
from collections.abc import Callable

import pytest
from lm_eval.tasks import TaskManager

from dynattn.scripts.evaluate.catalog import TaskCatalog
from dynattn.scripts.evaluate.suites import TASKS
from dynattn.scripts.evaluate.synthetic import (
    BUILDERS,
    CHANCE,
    FACTS,
    OPPOSITES,
    TEST_ITEMS,
    THINGS,
    TRAIN_ITEMS,
    Item,
    generate,
    load_dataset,
)

KINDS = sorted(BUILDERS)
KIND_OF = {thing: kind for kind, things in THINGS.items() for thing in things}
OPPOSITE_OF = dict(OPPOSITES) | {second: first for first, second in OPPOSITES}


def solve(item: Item) -> str:
    """Reads the text alone, knowing only kinds, opposites and the templates."""
    stated, question = item.text.removeprefix("< ").split(" > ")
    owned = re.findall(r"(\w+) has a (\w+)\.", stated)
    place = dict(re.findall(r"The (\w+) is in the (\w+)\.", stated))
    adjective = dict(re.findall(r"(\w+) is (\w+)\.", stated))
    answers: dict[str, Callable[[str], str]] = {
        r"(\w+) has a": lambda person: next(thing for owner, thing in owned if owner == person),
        r"The (\w+) belongs to": lambda wanted: next(owner for owner, thing in owned if thing == wanted),
        r"(\w+) has a kind of": lambda person: next(KIND_OF[thing] for owner, thing in owned if owner == person),
        r"Some kind of (\w+) belongs to": lambda kind: next(owner for owner, thing in owned if KIND_OF[thing] == kind),
        r"(\w+) does not have a": lambda person: next(thing for owner, thing in owned if owner != person),
        r"(\w+) does not have a kind of": lambda person: next(KIND_OF[t] for owner, t in owned if owner != person),
        r"(\w+) is the opposite of": lambda person: OPPOSITE_OF[adjective[person]],
        r"What (\w+) has is in the": lambda person: place[dict(owned)[person]],
    }
    (answer,) = [find(match[1]) for pattern, find in answers.items() if (match := re.fullmatch(pattern, question))]
    return answer


def accuracy(items: list[Item], guess: Callable[[Item], int]) -> float:
    return sum(guess(item) == item.label for item in items) / len(items)


@pytest.mark.parametrize("kind", KINDS)
def test_an_oracle_that_reads_the_text_solves_every_item(kind: str) -> None:
    for item in generate(kind):
        assert item.choices.count(solve(item)) == 1
        assert item.choices[item.label] == solve(item)


@pytest.mark.parametrize("kind", KINDS)
def test_constant_guesses_score_exactly_chance(kind: str) -> None:
    items = generate(kind)[TRAIN_ITEMS:]
    assert accuracy(items, lambda item: 0) == pytest.approx(CHANCE)
    last_choice = accuracy(items, lambda item: len(item.choices) - 1)
    assert last_choice == pytest.approx(CHANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_last_mentioned_and_fixed_preferences_score_near_chance(kind: str) -> None:
    items = generate(kind)
    stated = lambda item: item.text.split(" > ")[0]  # noqa: E731
    last_mentioned = accuracy(
        items, lambda item: max(range(item.facts), key=lambda i: stated(item).rfind(item.choices[i]))
    )
    alphabetical = accuracy(items, lambda item: min(range(item.facts), key=lambda i: item.choices[i]))
    shortest = accuracy(items, lambda item: min(range(item.facts), key=lambda i: len(item.choices[i])))
    assert max(last_mentioned, alphabetical, shortest) < CHANCE + 0.11  # three standard errors of 180 items


@pytest.mark.parametrize("kind", KINDS)
def test_items_are_balanced_distinct_and_the_same_every_time(kind: str) -> None:
    items = generate(kind)
    assert items == generate(kind)
    assert len({item.text for item in items}) == len(items) == TRAIN_ITEMS + TEST_ITEMS
    assert all(len(set(item.choices)) == len(item.choices) == item.facts for item in items)
    for split in (items[:TRAIN_ITEMS], items[TRAIN_ITEMS:]):
        positions = Counter((item.facts, item.label) for item in split)
        assert {positions[facts, label] * facts * len(FACTS) for facts in FACTS for label in range(facts)} == {
            len(split)
        }


def test_the_first_item_is_pinned() -> None:
    assert generate("two_step")[0] == Item(
        "< Clara has a ferry. Maya has a heron. The ferry is in the chapel. The heron is in the garage. > "
        "What Clara has is in the",
        ("chapel", "garage"),
        0,
        2,
    )


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="there is no synthetic task 'riddle'"):
        load_dataset("riddle")


def test_every_kind_is_a_task_of_the_group() -> None:
    loaded, missing = TaskCatalog(["dynattn_synthetic"]).load()
    tasks = loaded["tasks"].values()
    assert missing == {}
    assert sorted(task.task_name for task in tasks) == [f"dynattn_{kind}" for kind in KINDS]
    assert TaskCatalog(["dynattn_*"]).names == sorted(task.task_name for task in tasks)
    for task in tasks:
        assert len(task.eval_docs) == TEST_ITEMS
        assert task.config.metadata["chance"] == pytest.approx(CHANCE, abs=1e-4)


def test_tasks_load_with_the_metadata_that_the_lm_eval_command_passes() -> None:
    manager = TaskManager(
        include_path=str(TASKS), include_defaults=False, metadata={"pretrained": "x", "dtype": "float32"}
    )
    loaded = manager.load(["dynattn_owner", "builtin_heldout"])["tasks"]
    prompt = loaded["dynattn_owner"].fewshot_context(loaded["dynattn_owner"].eval_docs[0], 2)
    assert re.fullmatch(r"(< [^>]+ > The \w+ belongs to \w+\n){2}< [^>]+ > The \w+ belongs to", prompt)
