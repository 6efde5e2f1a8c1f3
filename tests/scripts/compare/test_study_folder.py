"""The folder of a study: what does not belong to it, and files that were cut off, are told by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from dynattn.scripts import cli
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.compare import study_folder
from dynattn.scripts.compare.record import MEASURED, OPTIONS, read_run
from dynattn.scripts.compare.study_folder import claim, draw, lock_of


def variants(**changed: Any) -> dict[str, Any]:
    """The settings of a comparison of two variants, the second with changes."""
    options = {"max_steps": 4, "dataset": "builtin"}
    return {"variants": {"a": options, "b": options | changed}, "steps": (1, 2)}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (variants(max_steps=5), "with other variants.b.max_steps (4 there, 5 now); give another --output"),
        (variants(dtype=None), "with other variants.b.dtype (absent there, None now); give"),
        ({"variants": {"a": {}}}, "with other variants.a.max_steps (4 there, absent now), variants.a.dataset ('built"),
        ({"seeds": 3}, "with other seeds (absent there, 3 now); give"),
        (variants(a=1, b=2, c=3, d=4), "variants.b.c (absent there, 3 now) and 1 more; give"),
    ],
    ids=["value", "option", "variant", "setting", "many"],
)
def test_settings_that_differ_are_told_with_both_values(settings: dict[str, Any], told: str, tmp_path: Path) -> None:
    claim(tmp_path / "study", {"seeds": 1}, "comparison")
    claim(tmp_path / "study", variants(), "comparison")  # nothing had been made with the settings before
    (tmp_path / "study" / "runs").mkdir()
    claim(tmp_path / "study", variants(), "comparison")
    with pytest.raises(UserError) as refused:
        claim(tmp_path / "study", settings, "comparison")
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("compare.job", "compare ours.yaml theirs.yaml"),
        ("reproduce.masked_lm.job", "reproduce masked-lm --dataset text"),
        ("reproduce.upcycling.job", "reproduce upcycling"),
    ],
)
def test_two_processes_do_not_make_runs_of_one_study(
    module: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ours.yaml", "theirs.yaml"):
        (tmp_path / name).write_text("max_steps: 4\n")
    monkeypatch.chdir(tmp_path)

    def fail(*_: Any) -> None:
        raise AssertionError("a run begins")

    monkeypatch.setattr(f"dynattn.scripts.{module}.make_runs", fail)
    with lock_of(tmp_path / "study"):
        assert cli.main([*command.split(), "--output", "study"]) == 2
    assert "output=study is in use by process" in capsys.readouterr().err
    claim(tmp_path / "study", variants(), "comparison")
    with lock_of(tmp_path / "study"):
        claim(tmp_path / "study", variants(max_steps=5), "comparison")  # the lock is nothing that was made


@pytest.mark.parametrize(
    ("commits", "told"),
    [
        (["now"], ""),
        ([None, "not stored"], ""),
        (["now", "then"], "runs were made with other code: commit then; this is now\n"),
    ],
)
def test_runs_of_other_commits_are_told(
    commits: list[str | None], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_folder, "source_commit", lambda: "now")
    (tmp_path / "record.json").write_text(json.dumps({"commit": commits}))
    text = draw(tmp_path, lambda _: "table", lambda *_: None, "plot.png")
    assert text == f"\ntable\n\n{told}{tmp_path}: record.json, table.md, plot.png"


@pytest.mark.parametrize("content", ['{"arms": {"a": ', "", "[1]"], ids=["half", "empty", "no object"])
def test_files_that_were_cut_off_are_named(content: str, tmp_path: Path) -> None:
    for name in ("record.json", "study.json", "result.json"):
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=r"record.json is damaged: .*; remove it, and run the study without --redraw"):
        draw(tmp_path, lambda _: "", lambda *_: None, "plot.png")
    with pytest.raises(UserError, match=r"study.json is damaged: .*; give another --output"):
        claim(tmp_path, variants(), "comparison")
    with pytest.raises(UserError, match=rf"result.json is damaged: .*; remove {tmp_path} to repeat the run"):
        read_run(tmp_path)
    result = {"flops_per_second": None, "arguments": {}}
    (tmp_path / "result.json").write_text(json.dumps(result))
    with pytest.raises(UserError, match=rf"metrics.jsonl holds no validation loss; remove {tmp_path} to repeat"):
        read_run(tmp_path)
    (tmp_path / "result.json").unlink()
    with pytest.raises(UserError, match=rf"holds no result.json; remove {tmp_path} to repeat the run"):
        read_run(tmp_path)


def test_a_run_whose_last_loss_was_cut_off_does_not_count_with_the_one_before(tmp_path: Path) -> None:
    options = dict.fromkeys(OPTIONS, 1)
    result = {**dict.fromkeys(MEASURED, 7), "flops_per_second": None, "dataset": "d", "validation_targets": 9}
    (tmp_path / "result.json").write_text(json.dumps({**result, "tokens": 200, "arguments": options}))
    lines = [
        {"step": n, "split": "validation", "tokens": 100 * n, "loss": 6.0 - n, "bits_per_byte": None} for n in (1, 2)
    ]
    metrics = "\n".join(map(json.dumps, lines))
    (tmp_path / "metrics.jsonl").write_text(metrics)
    assert [line["loss"] for line in read_run(tmp_path)["validation"]] == [5.0, 4.0]
    (tmp_path / "metrics.jsonl").write_text(metrics[:-9])
    told = rf"its last validation after 100 tokens, and the run read 200; remove {tmp_path} to repeat the run"
    with pytest.raises(UserError, match=told):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(metrics)
    without_dataset = {name: value for name, value in result.items() if name != "dataset"}
    for damaged in ({"arguments": {}}, {**without_dataset, "tokens": 200, "arguments": options}):
        (tmp_path / "result.json").write_text(json.dumps(damaged))
        with pytest.raises(UserError, match=rf"do not hold a finished run: KeyError: .*; remove {tmp_path} to repeat"):
            read_run(tmp_path)


def test_a_record_of_something_else_is_not_drawn(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text('{"mine": 1}')
    with pytest.raises(UserError, match=r"record.json is not of this study: KeyError: 'arms'; give another --output"):
        draw(tmp_path, lambda record: str(record["arms"]), lambda *_: None, "plot.png")
    with pytest.raises(UserError, match=r"record.json is not of this study: StopIteration; give another --output"):
        draw(tmp_path, lambda record: str(next(iter(()))), lambda *_: None, "plot.png")
    assert not (tmp_path / "table.md").exists()


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "study").write_text("mine")
    with pytest.raises(UserError, match=r"cannot write into .*study: File exists; give another --output"):
        claim(tmp_path / "study", variants(), "comparison")
    with pytest.raises(UserError, match="study: File exists"), lock_of(tmp_path / "study"):
        pass
    assert (tmp_path / "study").read_text() == "mine"
