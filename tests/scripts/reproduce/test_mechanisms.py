"""The study of mechanisms: its tasks against their definitions, its statistics, and a tiny one from end to end."""

import functools
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Generator, Tensor

from dynattn.scripts import cli
from dynattn.scripts.evaluate.synthetic import PEOPLE
from dynattn.scripts.reproduce.mechanisms import figures, training
from dynattn.scripts.reproduce.mechanisms.arguments import MechanismsArguments
from dynattn.scripts.reproduce.mechanisms.arms import ARMS, Size
from dynattn.scripts.reproduce.mechanisms.in_context import IN_CONTEXT, questions
from dynattn.scripts.reproduce.mechanisms.job import Study
from dynattn.scripts.reproduce.mechanisms.log_rank import log_rank
from dynattn.scripts.reproduce.mechanisms.plan import PRESETS, Preset, Run
from dynattn.scripts.reproduce.mechanisms.record import make_record
from dynattn.scripts.reproduce.mechanisms.table import table
from dynattn.scripts.reproduce.mechanisms.tasks import (
    IGNORED,
    LARGE,
    TASKS,
    FindBlock,
    Hops,
    OrderedMatch,
    Recall,
    SelectiveCopy,
    Task,
)  # fmt: skip
from dynattn.scripts.reproduce.mechanisms.training import rate_at, run_one


def draw(task: Task, number: int = 200) -> tuple[list[list[int]], list[list[int]]]:
    tokens, targets = task.sample(number, Generator().manual_seed(3))
    return tokens.tolist(), targets.tolist()


ALL_TASKS = {**TASKS, **LARGE, **IN_CONTEXT}


@pytest.mark.parametrize("name", ALL_TASKS)
def test_sequences_have_the_length_and_vocabulary_that_the_task_says(name: str):
    task = ALL_TASKS[name]
    tokens, targets = task.sample(16, Generator().manual_seed(0))
    assert tokens.shape == targets.shape == (16, task.length)
    assert tokens.min() >= 0 and tokens.max() < task.vocabulary
    asked = targets[targets != IGNORED]
    assert len(asked) >= 16
    assert asked.min() >= 0 and asked.max() < task.vocabulary
    again = task.sample(16, Generator().manual_seed(0))
    assert tokens.equal(again[0]) and targets.equal(again[1])


def test_recall_asks_for_the_value_behind_each_key():
    task = Recall(5)
    for tokens, targets in zip(*draw(task), strict=True):
        facts = dict(zip(tokens[0:10:2], tokens[1:10:2], strict=True))
        assert len(facts) == 5
        assert sorted(tokens[10:]) == sorted(facts)
        assert targets == [IGNORED] * 10 + [facts[key] for key in tokens[10:]]


def test_hops_ask_where_one_step_and_more_lead():
    for tokens, targets in zip(*draw(Hops(5, hops=3)), strict=True):
        image = dict(zip(tokens[0:10:2], tokens[1:10:2], strict=True))
        questions = [(tokens[at], tokens[at + 1] - 4) for at in range(10, 40, 2)]
        assert sorted(questions) == [(symbol, steps) for symbol in range(5) for steps in (1, 2, 3)]
        answers = [functools.reduce(lambda at, _: image[at], range(steps), symbol) for symbol, steps in questions]
        assert targets == [IGNORED] * 10 + [each for answer in answers for each in (IGNORED, answer)]


def test_find_block_has_one_answer_that_no_single_letter_tells():
    task = FindBlock(4)
    for tokens, targets in zip(*draw(task), strict=True):
        blocks = [tokens[start : start + 4] for start in range(0, 20, 5)]
        found = []
        for mark in range(22, 32, 3):
            asked = set(tokens[mark - 2 : mark])
            found += [block for block in blocks if asked <= set(block)]
            assert targets[mark] == found[-1][0]
            assert all(sum(letter in block for block in blocks) >= 2 for letter in asked)
        assert sorted(found) == sorted(blocks)
        assert {targets[at] for at in range(32) if at not in range(22, 32, 3)} == {IGNORED}


def test_an_ordered_match_has_its_reverse_beside_it():
    for tokens, targets in zip(*draw(OrderedMatch(3)), strict=True):
        facts = {(tokens[at], tokens[at + 1]): tokens[at + 2] for at in range(0, 18, 3)}
        questions = [(tokens[at], tokens[at + 1]) for at in range(18, 30, 2)]
        assert sorted(questions) == sorted(facts) and len(facts) == 6
        assert targets == [IGNORED] * 18 + [
            each for question in questions for each in (IGNORED, facts[question]) if facts[question[::-1]] != each
        ]


def test_selective_copy_asks_for_the_letters_in_their_order():
    for tokens, targets in zip(*draw(SelectiveCopy(3, 9)), strict=True):
        assert [token for token in tokens[:9] if token != 16] == targets[9:]
        assert tokens[9:] == [17] * 3


@pytest.mark.parametrize("name", IN_CONTEXT)
def test_in_context_questions_ask_for_the_word_behind_them_until_padding(name: str):
    task = IN_CONTEXT[name]
    words = {token: word for word, token in task.words.items()}
    for tokens, targets in zip(*draw(task), strict=True):
        asked = [at for at, target in enumerate(targets) if target != IGNORED]
        assert all(targets[at] == tokens[at + 1] for at in asked)
        assert all(tokens[: asked[-1] + 2]) and not any(tokens[asked[-1] + 2 :])
        begins = [0, *(at + 2 for at in asked[:-1])]
        assert words[tokens[0]] in ("<", "There")
        assert {words[tokens[at]] for at in begins} <= {"<", "There", "Who", *PEOPLE}


def test_no_in_context_word_is_missed():
    rng = random.Random(7)
    for task in IN_CONTEXT.values():
        drawn = (words for form in task.forms for _ in range(100) for words in questions(rng, form))
        assert {word for words in drawn for word in words} == set(task.words)


@pytest.mark.parametrize("task", [Recall(8), Hops(12), FindBlock(6), OrderedMatch(5), SelectiveCopy(8, 40)])
def test_no_constant_answer_is_often_right(task: Task):
    _, targets = draw(task, 2000)
    answers = [target for row in targets for target in row if target != IGNORED]
    assert Counter(answers).most_common(1)[0][1] / len(answers) < 2.0 / len(set(answers))


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_learns_from_every_answer(name: str):
    task = TASKS["recall-12"]
    model = ARMS[name].make(Size(16, heads=4, head_dim=4, layers=1), task.vocabulary, task.length)
    tokens, _ = task.sample(2, Generator().manual_seed(0))
    model(input_ids=tokens, labels=tokens).loss.backward()
    missing = [name for name, weight in model.named_parameters() if weight.grad is None]
    assert not missing
    heads = model.config.num_attention_heads
    assert heads == (8 if name == "plain-2h" else 4)


def test_sequences_that_are_scored_are_not_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    learned = []

    def remember(model: torch.nn.Module, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if model.training:
            learned.extend(row.tolist() for row in tokens[(targets != IGNORED).any(dim=1)])
        return original(model, tokens, targets)

    original = training.answers
    monkeypatch.setattr(training, "answers", remember)
    task = Hops(3, hops=1)  # of which there are 216 sequences
    preset = Preset(Size(8, heads=2, head_dim=4, layers=1), {"hops-3": task}, batch=64, steps=5, held_out=40)
    run_one(Run("hops-3", "plain", 1, 2, 0, 1e-3), preset)
    scored = task.sample(40, Generator().manual_seed(training.HELD_OUT_SEED))[0].tolist()
    assert len(learned) > 150 and not [row for row in learned if row in scored]


def test_the_rate_warms_up_and_falls_to_a_tenth():
    rates = [rate_at(step, 100) for step in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5] == 1.0
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


def test_unsolved_runs_are_censored_in_the_log_rank_test():
    """Two groups of two by hand: at 10 one of four at risk ends, in the first group; at 20 one of three."""
    found = log_rank([([10, None], [20, None])])
    assert found["deviation"] == pytest.approx(1 - 1 / 2 - 1 / 3)
    assert found["p"] == pytest.approx(1)  # the other ways deviate as much, or by 7 / 6
    assert log_rank([([10, 20], [None, None])])["p"] == pytest.approx(2 / 6)
    assert log_rank([([None], [None])]) == {"p": None, "deviation": 0.0}


def test_five_runs_against_five_have_no_smaller_p_than_two_ways_of_all():
    """All of one group are earlier than all of the other; normal approximation says 0.0027."""
    found = log_rank([([100] * 4 + [200], [300, 400, 500, 600, None])])
    assert found["p"] == pytest.approx(2 / math.comb(10, 5))


def deviation(times: Sequence[float | None], first: Sequence[int]) -> float:
    """Observed minus expected, summed over times, where runs with the indices `first` are the first group."""
    ends = [math.inf if at is None else at for at in times]
    total = 0.0
    for at in {end for end in ends if end < math.inf}:
        risk = [index for index, end in enumerate(ends) if end >= at]
        solved = [index for index in risk if ends[index] == at]
        total += sum(index in first for index in solved)
        total -= len(solved) * sum(index in first for index in risk) / len(risk)
    return total


@pytest.mark.parametrize(
    "strata",
    [
        [([100, 100, 250, None, 300], [200, 250, None, None, None])],
        [([100, 100, 250, None, 300], [200, 250, None, None, None, 250, 400])],  # twelve: scores are rounded
        [([100, 100, 250], [200, None, None]), ([50, None], [60, 60, 70]), ([None] * 2, [None] * 2)],
        [([100], [200, 300]), ([200, 300], [100])],
    ],
)
def test_p_is_the_share_of_all_ways_to_deal_the_runs(strata: list[tuple[list[int | None], list[int | None]]]):
    ways = []
    for first, second in strata:
        pool = [*first, *second]
        ways.append([deviation(pool, chosen) for chosen in combinations(range(len(pool)), len(first))])
    actual = sum(deviations[0] for deviations in ways)  # the first way is the one that was
    sums = [sum(one) for one in product(*ways)]
    found = log_rank(strata)
    assert found["deviation"] == pytest.approx(actual)
    assert found["p"] == pytest.approx(sum(abs(one) >= abs(actual) - 1e-9 for one in sums) / len(sums))


def test_rounding_of_scores_never_makes_p_smaller():
    """With twelve runs the scores are no whole numbers of parts."""
    first, second = [20, 23, 27, 9, 3, 23], [10, 28, 23, 22, 16, 29]
    sums = [deviation([*first, *second], chosen) for chosen in combinations(range(12), 6)]
    exact = sum(abs(one) >= abs(sums[0]) - 1e-9 for one in sums) / len(sums)
    found = log_rank([(first, second)])["p"]
    assert found is not None and exact - 1e-12 <= found <= exact + 0.02


def test_with_many_runs_p_is_that_of_the_normal_approximation():
    first, second = list(range(1, 21)), list(range(4, 24))
    found = log_rank([(first, second)])["p"]
    assert found == pytest.approx(float(stats.logrank(first, second).pvalue), rel=0.1)


SETTINGS = {"steps": 10, "batch": 50, "learning_rates": [1e-3], "tuning_seed": 9}


def finished(task: str, arm: str, seed: int, solved: int | None, heads: int = 4) -> dict[str, object]:
    run = asdict(Run(task, arm, 2, heads, seed, 1e-3))
    accuracy = 1.0 if solved else 0.5
    return {
        "run": run, "parameters": 1234, "solved_at": solved, "accuracy": accuracy, "hardware": "h", "versions": {},
    }  # fmt: skip


def test_the_table_answers_the_question():
    runs = [finished("recall-12", "plain", seed, None) for seed in range(5)]
    runs += [finished("recall-12", arm, seed, 100 + seed) for arm in ("plain-2h", "full") for seed in range(5)]
    record = make_record(runs, SETTINGS)
    text = table(record)
    assert "| recall-12, 2 layers, H = 4 | 0 of 5 | 5 of 5 | 5 of 5 |" in text
    assert "against plain p = " in text and "against plain, twice the heads p = 1 (+0.0 runs)" in text
    assert "heads to solve" not in text
    assert "| plain | 1,234 | 0 of 5 | 500 | 0.500 |  |" in text
    assert record["tasks"][0]["log_rank"]["full against plain-2h"]["p"] == pytest.approx(1.0)
    assert record["tasks"][0]["log_rank"]["full against plain"]["p_holm"] < 0.01
    unsolved = [finished("recall-12", arm, seed, None) for arm in ("plain", "plain-2h", "full") for seed in range(2)]
    assert "DCMHA against plain nothing tells them apart" in table(make_record(unsolved, SETTINGS))


def test_heads_to_solve_counts_the_heads_of_each_side():
    runs = [finished("recall-12", arm, seed, None, heads=2) for arm in ("plain", "plain-2h") for seed in range(3)]
    runs += [finished("recall-12", "full", seed, 100, heads) for heads in (2, 4) for seed in range(3)]
    runs += [finished("recall-12", "plain-2h", seed, 100 if seed else None, heads=4) for seed in range(3)]
    runs += [finished("recall-12", "plain", seed, 100 if seed > 1 else None, heads=4) for seed in range(3)]
    text = table(make_record(runs, SETTINGS))
    assert "| plain | more than 4 |" in text
    assert "| plain, twice the heads | 8 |" in text
    assert "| DCMHA | 2 |" in text


def test_heads_to_solve_takes_each_arm_where_it_was_run():
    """Composition cannot have a single head, and one attention was run on one of two tasks."""
    runs = [finished("recall-12", "plain", seed, 100, heads) for heads in (1, 2, 4) for seed in range(3)]
    runs += [finished("recall-12", "full", seed, 100, heads) for heads in (2, 4) for seed in range(3)]
    runs += [finished("selective-copy-4", arm, seed, None, 2) for arm in ("plain", "mdha") for seed in range(3)]
    refused = [{"arm": arm, "heads": 1, "reason": "takes at least 2 heads"} for arm in ("full", "rank-1")]
    text = table(make_record(runs, {**SETTINGS, "refused": refused}))
    assert "| plain | 1 | more than 2 |" in text
    assert "| DCMHA | 2 (H = 2, 4) |  |" in text
    assert "| MDHA |  | more than 2 |" in text
    assert "of H = 1, 2, 4, or of those in brackets" in text
    assert "Not with H = 1: DCMHA, DCMHA, rank 1 (takes at least 2 heads)." in text


def test_a_record_without_its_runs_gets_its_tests_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = [finished("recall-12", "plain", seed, 9 + seed) for seed in range(5)]
    runs += [finished("recall-12", "full", seed, 99 + seed) for seed in range(5)]
    record = make_record(runs, SETTINGS)
    earlier = json.loads(json.dumps(record))
    earlier["tasks"][0]["log_rank"]["full against plain"] |= {"p": 0.0027, "p_holm": 0.0027}
    (tmp_path / "record.json").write_text(json.dumps(earlier))
    assert cli.main(["reproduce", "mechanisms", "--output", str(tmp_path), "--redraw"]) == 0
    assert json.loads((tmp_path / "record.json").read_text()) == record
    assert "| 0.0079 |" in capsys.readouterr().out


def test_runs_of_another_length_are_not_drawn_as_if_they_were_of_this_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    Study(MechanismsArguments(output=str(tmp_path / "quick"), quick=True)).claim()
    (tmp_path / "quick/runs").mkdir()
    assert cli.main(["reproduce", "mechanisms", "--output", str(tmp_path / "quick"), "--redraw"]) == 2
    assert "holds a study with other steps (100 there, 2000 now)" in capsys.readouterr().err


def test_every_run_is_drawn_in_the_row_of_its_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Panels may lack arms, and a run that solved nothing stands at the last sequence."""
    times = {("recall-12", "plain"): (3, None), ("recall-12", "mdha"): (9, 9), ("selective-copy-4", "mdha"): (None, 5)}
    runs = [finished(*cell, seed, step) for cell, steps in times.items() for seed, step in enumerate(steps)]
    drawn: list[Any] = []
    monkeypatch.setattr(figures.plt, "close", drawn.append)
    figures.draw_solved(make_record(runs, SETTINGS), tmp_path / "solved.png")
    lines = [[line for line in axes.get_lines() if line.get_marker() in (">", "o")] for axes in drawn[0].axes]
    found = [[(line.get_marker(), *line.get_xydata()[0].round()) for line in panel] for panel in lines]
    words = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    monkeypatch.undo()
    figures.plt.close(drawn[0])
    assert words == ["solved", "not solved", "mean of both"], "the mean is also of runs that are not solved"
    assert found == [[("o", 3, 0), (">", 500, 0), ("o", 9, 1), ("o", 9, 1)], [("o", 5, 1), (">", 500, 1)]]


TINY = Preset(Size(16, heads=2, head_dim=8, layers=1), {"recall-12": Recall(2, values=4)}, 4, 2, 1, 8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "chess"], "tasks ['chess'] do not exist; choose from recall-12"),
        (["--arms", "magic"], "arms ['magic'] do not exist; choose from plain"),
        (["--quick", "--arms", "magic"], "arms ['magic'] do not exist; choose from plain"),
        (["--seeds", "1", "1"], "two or more different ones"),
        (["--workers", "0"], "workers=0 must be 1 or more"),
        (["--redraw"], "holds no measured run yet"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert cli.main(["reproduce", "mechanisms", "--output", str(tmp_path / "study"), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_tiny_study_stops_in_time_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(PRESETS, "cpu", TINY)
    command = ["reproduce", "mechanisms", "--output", str(tmp_path / "study"), "--arms", "plain", "full"]
    command += ["--seeds", "0", "1", "--learning_rates", "1e-3", "1e-2"]
    assert cli.main([*command, "--max_seconds", "0"]) == 2
    assert not list((tmp_path / "study").rglob("runs/*/*.json"))
    assert cli.main(command) == 0
    made = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "study").rglob("runs/*/*.json")}
    assert len(made) == 4 + 4
    assert cli.main(command) == 0
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "study").rglob("runs/*/*.json")} == made
    record = json.loads((tmp_path / "study" / "record.json").read_text())
    assert record["tasks"][0]["arms"]["full"]["seeds"] == [0, 1]
    assert (tmp_path / "study" / "solved.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(PRESETS, "cpu", replace(TINY, tasks={"recall-12": Recall(2, values=5)}))
    assert cli.main(command) == 2
    assert "was made with another task; give another --output" in capsys.readouterr().err
    monkeypatch.setitem(PRESETS, "cpu", Preset(TINY.size, TINY.tasks, 4, steps=3))
    assert cli.main(command) == 2
    assert "holds a study with other steps" in capsys.readouterr().err


def test_attentions_that_need_more_heads_are_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(PRESETS, "cpu", TINY)
    command = ["reproduce", "mechanisms", "--output", str(tmp_path / "study"), "--arms", "plain", "full", "rank-4"]
    assert cli.main([*command, "--seeds", "0", "1", "--learning_rates", "1e-3", "--heads", "1", "2"]) == 0
    told = capsys.readouterr().out
    assert "full is left out with 1 heads" in told
    assert "rank-4 is left out with 2 heads" in told and "compose_rank (4) must be from 1 to the heads" in told
    record = json.loads((tmp_path / "study" / "record.json").read_text())
    assert [set(task["arms"]) for task in record["tasks"]] == [{"plain"}, {"plain", "full"}]


def test_a_width_that_the_heads_do_not_divide_is_told_as_a_reason():
    told = ARMS["rcmha"].refusal(Size(64, heads=3, head_dim=16, layers=2))
    assert told == "hidden_size (64) must be a multiple of num_attention_heads (3), or give head_dim"


def test_all_arms_of_a_seed_read_the_same_sequences():
    seen: list[Tensor] = []

    class Watched(Recall):
        def sample(self, number: int, random: Generator) -> tuple[Tensor, Tensor]:
            tokens, targets = super().sample(number, random)
            seen.append(tokens)
            return tokens, targets

    preset = Preset(TINY.size, {"recall-12": Watched(2, values=4)}, 4, 2, 1, 8)
    for arm in ("plain", "full"):
        run_one(Run("recall-12", arm, 1, 2, 0, 1e-3), preset)
    assert all(map(torch.equal, seen[:3], seen[3:]))
    assert not torch.equal(seen[1], seen[2])


def test_the_seed_of_a_run_decides_its_initial_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    weights: list[Tensor] = []

    def remember(model: torch.nn.Module, *_: object) -> list[tuple[int, float]]:
        weights.append(torch.cat([weight.flatten() for weight in model.parameters()]))
        return [(1, 0.0)]

    monkeypatch.setattr(training, "train", remember)
    preset = Preset(TINY.size, TASKS, 4, 2, 1, 8)
    for seed in (0, 0, 1):
        run_one(Run("recall-12", "full", 1, 2, seed, 1e-3), preset)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])
