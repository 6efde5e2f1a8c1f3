"""The study of position schemes: tasks against their definitions, statistics, and a tiny study from end to end."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dynattn.scripts import cli
from dynattn.scripts.common.environment import hardware, versions
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.reproduce.model_training import make_optimizer
from dynattn.scripts.reproduce.positions import training
from dynattn.scripts.reproduce.positions.arguments import SCHEMES, TASKS, PositionsArguments
from dynattn.scripts.reproduce.positions.job import chosen_rates, tuning_runs
from dynattn.scripts.reproduce.positions.record import falls_below_half, longer_match, make_record, table, trained_match
from dynattn.scripts.reproduce.positions.tasks import (
    BOS,
    EOS,
    FIRST_SYMBOL,
    SEP,
    Batch,
    lengths_to_test,
    make_batch,
    trained_length,
)
from dynattn.scripts.reproduce.positions.training import Run, config_of, make_model
from dynattn.scripts.reproduce.study_runs import StudyRuns


def number(digits: np.ndarray) -> int:
    return int("".join(map(str, digits)))


ANSWERS: dict[str, Any] = {
    "copy-one": lambda prompt: prompt,
    "copy-many": lambda prompt: prompt,
    "reverse": lambda prompt: prompt[::-1],
    "sort": sorted,
    "sum": lambda prompt: [sum(prompt) % 10],
    "parity": lambda prompt: [sum(prompt) % 2],
}


@pytest.mark.parametrize("task", ANSWERS)
@pytest.mark.parametrize("length", [1, 2, 20])
def test_answers_follow_the_definition_of_their_task(task: str, length: int) -> None:
    batch = make_batch(task, np.random.default_rng(0), 50, length)
    for row in batch.tokens:
        prompt, answer = row[1 : batch.answer - 1] - FIRST_SYMBOL, row[batch.answer : -1] - FIRST_SYMBOL
        assert (row[0], row[batch.answer - 1], row[-1]) == (BOS, SEP, EOS) and len(prompt) == length
        assert list(answer) == list(ANSWERS[task](list(prompt)))
    if task == "copy-one":
        assert all(len(set(row[1 : length + 1])) == 1 for row in batch.tokens)
    if task == "sort":
        assert all(len(set(row[1 : length + 1])) == length for row in batch.tokens)


@pytest.mark.parametrize("reverses", [False, True])
def test_sums_of_long_numbers_carry(reverses: bool) -> None:
    batch = make_batch("addition-reversed" if reverses else "addition", np.random.default_rng(0), 50, 6)
    assert batch.tokens.dtype == np.int64
    order = slice(None, None, -1) if reverses else slice(None)
    for row in batch.tokens - FIRST_SYMBOL:
        first, second, total = row[1:7][order], row[8:14][order], row[15:22][order]
        assert number(first) + number(second) == number(total)


def test_lengths_are_those_of_the_paper_or_what_is_asked() -> None:
    assert [trained_length(task, 0) for task in TASKS[:4]] == [20, 20, 8, 8]
    assert trained_length("sort", 10) == 10 and list(lengths_to_test(10)) == list(range(1, 26))


def test_a_run_trains_on_all_lengths_up_to_the_longest_and_is_tested_on_longer_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths: dict[int, list[int]] = {2: [], 3: []}

    def recorded(task: str, rng: np.random.Generator, batch: int, length: int) -> Batch:
        lengths[batch].append(length)
        return make_batch(task, rng, batch, length)

    monkeypatch.setattr(training, "make_batch", recorded)
    monkeypatch.setattr(training, "BATCH", 2)
    monkeypatch.setattr(training, "TEST_EXAMPLES", 3)
    result = training.train(Run("copy-many", "rope", "off", 0, 1e-3, 20, 1, 3))
    assert (set(lengths[2]), lengths[3]) == ({1, 2, 3}, [1, 2, 3, 4, 5, 6, 7])
    assert (result["trained"], len(result["exact_match"])) == (3, 7)


class Knowing(torch.nn.Module):
    """Predicts the tokens that follow, but 50 of 200 answers of more than one symbol not to their end."""

    def forward(self, tokens: torch.Tensor, **_: Any) -> Any:
        following = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], EOS)], dim=1)
        following[: 50 if tokens.shape[1] > 4 else 0, -1] = SEP
        return SimpleNamespace(logits=torch.nn.functional.one_hot(following).float())


def test_an_answer_is_right_if_all_of_its_tokens_are() -> None:
    assert training.test(Knowing(), "copy-one", trained=2) == [1.0, 0.75, 0.75, 0.75, 0.75]


def run_of(scheme: str, composition: str, seed: int, matches: list[float]) -> dict[str, Any]:
    names = {"task": "copy-one", "scheme": scheme, "composition": composition, "seed": seed}
    return {**names, "learning_rate": 1e-3, "parameters": 10, "trained": 2, "exact_match": matches}


def record_of(*runs: dict[str, Any]) -> dict[str, Any]:
    return make_record({"seeds": [0, 1], "steps": 3, "layers": 1}, runs)


def test_the_record_counts_all_runs_and_compares_by_seed() -> None:
    runs = [run_of("none", "off", seed, [1.0, 1.0, 0.75, 0.25, 0.0]) for seed in (0, 1)]
    runs += [run_of("none", "on", seed, [1.0, 0.8 + seed / 10, 0.5 - seed / 10, 0.0, 0.0]) for seed in (0, 1)]
    runs += [run_of("rope", "off", seed, [1.0, 1.0, 0.0, 0.0, 0.0]) for seed in (0, 1)]
    assert (trained_match(runs[0]), longer_match(runs[0]), falls_below_half(runs[0])) == (1.0, 0.5, 4)
    record = record_of(*runs)
    assert [cell["learned"] for cell in record["cells"]] == [2, 1, 2]
    (difference,) = record["composition"]
    assert difference["values"] == pytest.approx([-0.25, -0.3])
    assert record["reciprocal_ranks"] == {"off": {"none": 1.0, "rope": 0.5}, "on": {"none": 1.0}}
    text = table(record)
    assert "| copy-one | none | off | 2 of 2 | 1.000 ± 0.000 | 0.500 ± 0.000 | 0.500 ± 0.000 | 4, 4 | 0.986 |" in text
    assert "| copy-one | none | on | 1 of 2 | 0.925 ± 0.035 | 0.225 ± 0.035 | 0.200 |" in text
    assert "-0.275" in text and text.endswith(
        "Mean reciprocal ranks over tasks: plain none 1.000, rope 0.500; composed none 1.000."
    )


def test_a_cell_in_which_no_run_learned_has_no_mean_of_the_learned() -> None:
    text = table(record_of(*(run_of("alibi", "off", seed, [0.5] * 5) for seed in (0, 1))))
    assert "| copy-one | alibi | off | 0 of 2 | 0.500 ± 0.000 | 0.500 ± 0.000 |  | -, - | 0.289 |" in text


def test_parity_is_reported_but_not_ranked() -> None:
    runs = [run_of("none", "off", seed, [1.0, 1.0, 0.5, 0.5, 0.5]) | {"task": "parity"} for seed in (0, 1)]
    record = record_of(*runs)
    assert record["reciprocal_ranks"] == {}
    assert "| parity | none | off |" in table(record) and "ranks" not in table(record)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_composed_models_start_from_the_weights_of_plain_ones(scheme: str) -> None:
    runs = {name: Run("sort", scheme, name, 3, 1e-3, 10, 2, 5) for name in ("off", "on", "wide")}
    plain, composed, wide = (make_model(runs[name]) for name in ("off", "on", "wide"))
    shared = composed.state_dict()
    assert all(torch.equal(weight, shared[name]) for name, weight in plain.state_dict().items())
    assert abs(wide.num_parameters() / composed.num_parameters() - 1) < 0.01
    groups = make_optimizer(composed, 1e-3).param_groups
    assert sum(len(group["params"]) for group in groups) == len(list(composed.parameters()))


def test_truncation_is_told_the_longest_training_input() -> None:
    config = config_of(Run("sort", "truncated", "off", 3, 1e-3, 10, 1, 5), composed=False)
    assert config.rope_parameters["truncate_length"] == len("B12345S12345")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--tasks", "knit"], "tasks=['knit'] must be some of copy-one"),
        (["--schemes", "abili"], "schemes=['abili'] must be some of none, t5"),
        (["--quick", "--tasks", "knit"], "tasks=['knit'] must be some of copy-one"),
        (["--quick", "--schemes", "rop"], "schemes=['rop'] must be some of none, t5"),
        (["--quick", "--wide", "rop"], "wide=['rop'] must be some of none, t5"),
        (["--seeds", "1"], "must be two or more different ones"),
        (["--seeds", "1", "100"], "tuning_seed=100 is one of the measured"),
        (["--steps", "1"], "steps=1 must be 2 or more"),
        (["--workers", "0"], "workers=0 1 or more"),
        (["--wide", "rope-quarter"], "wide=['rope-quarter'] must be some of the schemes"),
        (["--learning_rates", "0"], "must be one or more positive numbers"),
        (["--schemes", "rope-none", "--layers", "1", "--wide", "rope-none"], "rope-none needs 2 layers"),
        (["--max_seconds", "-1"], "max_seconds=-1.0 must be 0 or more"),
        (["--redraw"], "holds no record.json"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_told(options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "positions", "--output", str(tmp_path / "new"), *options]) != 0
    assert told in capsys.readouterr().err


def test_the_quick_study_takes_the_place_of_what_else_is_given() -> None:
    arguments = PositionsArguments(quick=True, schemes=["rope"], steps=1)
    assert (arguments.schemes, arguments.wide, arguments.steps) == (["none", "t5", "alibi", "rope"], [], 1000)


def test_a_single_learning_rate_needs_no_trial(tmp_path: Path) -> None:
    arguments = PositionsArguments(learning_rates=[3e-3])
    assert tuning_runs(arguments) == []
    runs = StudyRuns(tmp_path / "runs", training.train, str, workers=1, max_seconds=None)
    assert chosen_rates(arguments, runs) == {"off": 3e-3, "on": 3e-3}


def test_names_that_are_given_twice_count_once() -> None:
    """The runs of a repeated cell would be counted twice, and intervals become too narrow."""
    arguments = PositionsArguments(tasks=["sum", "sort", "sum"], schemes=["rope", "none", "rope"], wide=["rope"] * 2)
    assert (arguments.tasks, arguments.schemes, arguments.wide) == (["sum", "sort"], ["rope", "none"], ["rope"])


def test_a_tiny_study_runs_resumes_and_keeps_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "TEST_EXAMPLES", 4)
    monkeypatch.setattr(training, "BATCH", 4)
    words = ["reproduce", "positions", "--output", str(tmp_path), "--steps", "3", "--layers", "1", "--longest", "3"]
    words += ["--tasks", "copy-many", "--schemes", "rope", "alibi-composed", "--wide", "rope", "--seeds", "0", "1"]
    assert cli.main([*words, "--learning_rates", "1e-3", "2e-3", "--max_seconds", "1e-9"]) != 0
    assert "4 runs are left" in capsys.readouterr().err
    assert cli.main([*words, "--learning_rates", "1e-3", "2e-3"]) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert len(record["runs"]) == 10 and len(list((tmp_path / "runs").rglob("*.json"))) >= 12
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    tuning = record["settings"]["tuning"]
    for composition, rate in record["settings"]["chosen"].items():
        assert set(tuning[composition]) == {"0.001", "0.002"}
        assert tuning[composition][f"{rate:g}"] == max(tuning[composition].values())
    monkeypatch.setattr("dynattn.scripts.reproduce.positions.job.train", lambda run: pytest.fail(f"repeats {run}"))
    assert cli.main([*words, "--learning_rates", "1e-3", "2e-3"]) == 0
    assert cli.main([*words, "2", "--learning_rates", "1e-3", "2e-3", "--max_seconds", "0"]) == 0
    assert json.loads((tmp_path / "record.json").read_text())["settings"]["seeds"] == [0, 1]
    assert "5 runs are left" in capsys.readouterr().out
    check_origins(tmp_path, [*words, "--learning_rates", "1e-3", "2e-3", "--max_seconds", "0"])
    monkeypatch.setattr(training, "BATCH", 5)
    assert cli.main([*words, "--learning_rates", "1e-3", "2e-3"]) != 0
    assert "was made with another batch; give another --output, or remove the file" in capsys.readouterr().err
    with pytest.raises(UserError, match="holds a study with other steps"):
        from dynattn.scripts.reproduce.positions.job import run_study

        run_study(PositionsArguments(output=str(tmp_path), steps=4, layers=1, longest=3))


def check_origins(folder: Path, command: list[str]) -> None:
    """The record says where each run was made, and what runs of earlier versions have not stored."""
    record = json.loads((folder / "record.json").read_text())
    assert record["hardware"] == [hardware(torch.device("cpu"))] and record["versions"] == [versions()]
    assert not {"hardware", "versions", "commit", "date", "definition"} & set(record["runs"][0])
    older = next((folder / "runs").rglob("rope-wide-seed-0-*.json"))
    run = json.loads(older.read_text())
    assert run["definition"]["scheme"] == SCHEMES["rope"]
    names = ("hardware", "versions", "definition", "commit", "date")
    older.write_text(json.dumps({name: value for name, value in run.items() if name not in names}))
    assert cli.main(command) == 0
    record = json.loads((folder / "record.json").read_text())
    assert len(record["hardware"]) == 2 and "not stored" in record["hardware"] and "not stored" in record["versions"]
