"""The quickstart: its table and plot, what it repeats, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dynattn.scripts import cli
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.reproduce import quickstart
from dynattn.scripts.reproduce.quickstart import draw_losses

RECORDS = Path(__file__).parents[3] / "model_cards" / "records" / "quickstart"


@pytest.fixture
def finished_runs(tmp_path: Path) -> Path:
    """Result files as both jobs leave them, with numbers that are easy to find again."""
    for number, name in enumerate(quickstart.MODELS, start=1):
        (tmp_path / name / "evaluation").mkdir(parents=True)
        result = {"parameters": 1000 * number, "validation_loss": number, "bits_per_byte": number / 2}
        (tmp_path / name / "result.json").write_text(json.dumps(result | {"tokens_per_second": 5000.4}))
        tasks = [
            {"task": "builtin_heldout", "metrics": {"bits_per_byte": {"value": number / 4}}},
            {"task": "dynattn_synthetic", "metrics": {"acc": {"value": 0.25}}, "chance": 0.361},
        ]
        (tmp_path / name / "evaluation" / "results.json").write_text(json.dumps({"tasks": tasks}))
        lines = [
            {"step": 1, "split": "train", "tokens": 10, "loss": 3.0},
            {"step": 2, "split": "train", "tokens": 20, "loss": 2.5},
            {"step": 2, "split": "validation", "tokens": 20, "loss": 2.7},
        ]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


def test_the_quickstarts_table_and_plot_come_from_the_runs(finished_runs: Path) -> None:
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in quickstart.comparison(finished_runs).split("\n")
    ]
    assert rows[2] == ["DCFormer", "1,000", "1.0000", "0.5000", "0.2500", "0.250 (guessing 0.361)", "5,000"]
    assert rows[3][0] == "plain Transformer"
    draw_losses(
        {label: finished_runs / name for name, label in quickstart.MODELS.items()}, finished_runs / "losses.png"
    )
    assert (finished_runs / "losses.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("moved", "says"), [(0.004, "no more than the 0.0146"), (-0.3, "; more than the 0.0146")])
def test_the_quickstart_says_where_its_losses_fell(finished_runs: Path, moved: float, says: str) -> None:
    write_losses(finished_runs, moved, quickstart.RECORDED_TEXT)
    shown = quickstart.placement(finished_runs, quickstart.QuickstartArguments())
    assert f"DCFormer {moved:+.4f}, plain Transformer {moved:+.4f}" in shown and says in shown
    assert quickstart.placement(finished_runs, quickstart.QuickstartArguments(seed=1)) == ""


def test_the_quickstart_does_not_judge_losses_of_another_text(finished_runs: Path) -> None:
    write_losses(finished_runs, -0.14, "pydoc_data.topics of CPython 3.13.0")
    shown = quickstart.placement(finished_runs, quickstart.QuickstartArguments())
    assert "DCFormer -0.1400" in shown and str(quickstart.MOVED) not in shown
    assert "those are of another text, pydoc_data.topics of CPython 3.11.7" in shown


def write_losses(output: Path, moved: float, text: str) -> None:
    """The results of both models: losses so far from the recorded ones, on this text."""
    for name, loss in quickstart.RECORDED.items():
        result = {"validation_loss": loss + moved, "dataset": text}
        (output / name / "result.json").write_text(json.dumps(result))


@pytest.mark.parametrize("option", [["--max_steps", "25"], ["--seed", "1"]], ids=["max_steps", "seed"])
def test_the_quickstart_does_not_show_runs_with_other_arguments(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the two models one is finished."""
    (tmp_path / "dcformer").mkdir()
    result = {"arguments": {"max_steps": 300, "seed": 0}}
    (tmp_path / "dcformer" / "result.json").write_text(json.dumps(result))
    monkeypatch.setattr(quickstart, "run_once", None)
    assert cli.main(["quickstart", "--output", str(tmp_path), *option]) == 2
    name, value = option[0].removeprefix("--"), option[1]
    told = f"is of a run with {name}={result['arguments'][name]}, and not {value}; give another --output"
    assert told in capsys.readouterr().err
    quickstart.check_finished(tmp_path, quickstart.QuickstartArguments())


@pytest.mark.parametrize("foreign", ['{"loss": 1}', '{"arguments": null}', '{"arguments": {"seed": 0}}'])
def test_the_quickstart_refuses_results_of_something_else(
    foreign: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dcformer").mkdir()
    (tmp_path / "dcformer" / "result.json").write_text(foreign)
    assert cli.main(["quickstart", "--output", str(tmp_path)]) == 2
    assert "is not the result of a run of dynattn pretrain; give another --output" in capsys.readouterr().err


def test_the_recorded_losses_are_those_of_the_record() -> None:
    content = json.loads((RECORDS / "record.json").read_text())
    losses = {name: round(runs["training"]["validation_loss"], 4) for name, runs in content.items()}
    assert losses == quickstart.RECORDED
    other = json.loads((RECORDS / "other-processor.json").read_text())
    moved = [abs(other[name]["training"]["validation_loss"] - loss) for name, loss in quickstart.RECORDED.items()]
    assert quickstart.MOVED - 1e-4 < max(moved) <= quickstart.MOVED
    assert {runs["training"]["dataset"] for runs in content.values()} == {quickstart.RECORDED_TEXT}


def test_the_quickstart_refuses_fewer_updates_than_the_warmup_in_its_own_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = Path(quickstart.__file__).parents[1] / "pretrain" / "recipes" / "tiny.yaml"
    assert f"warmup_steps: {quickstart.WARMUP}\n" in recipe.read_text(encoding="utf-8")
    assert cli.main(["quickstart", "--output", str(tmp_path / "q"), "--max_steps", "20"]) == 2
    assert "max_steps=20 must be above 20" in capsys.readouterr().err
    assert not (tmp_path / "q").exists()


def test_the_quickstart_does_not_repeat_what_is_done(
    finished_runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def start(command: list[str]) -> SimpleNamespace:
        started.append(command)
        return SimpleNamespace(wait=lambda: 2)

    monkeypatch.setattr(subprocess, "Popen", start)
    quickstart.run_once(finished_runs / "dcformer" / "result.json", ["pretrain", "--no-such-option"])
    assert "done before" in capsys.readouterr().out
    assert not started
    with pytest.raises(UserError, match="'dynattn pretrain' did not run, as it says above"):
        quickstart.run_once(finished_runs / "missing.json", ["pretrain", "--no-such-option"])
    monkeypatch.setattr(subprocess, "Popen", lambda command: SimpleNamespace(wait=lambda: 1))
    with pytest.raises(UserError, match="'dynattn pretrain' ended with status 1; run this again"):
        quickstart.run_once(finished_runs / "missing.json", ["pretrain"])
    assert started == [[sys.executable, "-m", "dynattn.scripts.cli", "pretrain", "--no-such-option"]]


@pytest.mark.slow
def test_the_whole_quickstart(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["quickstart", "--output", str(tmp_path / "q"), "--max_steps", "25"]) == 0
    shown = capfd.readouterr().out
    assert "DCFormerForCausalLM with 1,373,568 parameters says:" in shown
    assert {"losses.png", "table.md"} <= {path.name for path in (tmp_path / "q").iterdir()}
