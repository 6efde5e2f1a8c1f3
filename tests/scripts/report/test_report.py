"""The page of curves: what it shows, that it needs nothing else, and runs that are not finished."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from cases.html_page import Page
from matplotlib.figure import Figure

from dynattn.scripts.cli import main
from dynattn.scripts.report import charts, page
from dynattn.scripts.report.run import ReportedRun


def write_run(folder: Path, **changes: Any) -> Path:
    """A run of thirty updates with everything that a report can show."""
    folder.mkdir()
    lines: list[dict[str, Any]] = []
    for step in range(1, 31):
        lines.append({"step": step, "split": "train", "loss": 5 / step, "grad_norm": 1.0, "learning_rate": 1e-3 / step})
        if step % 10 == 0:
            lines.append({"step": step, "split": "validation", "loss": 6 / step, "bits_per_byte": 2.0})
            terms = {
                f"{layer:02}.{stage}.query_low_rank": 0.1 * layer for layer in range(3) for stage in ("pre", "post")
            }
            lines.append({"step": step, "split": "composition", **terms})
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 31, "spl')
    arguments = {"learning_rate": 1e-3, "seed": 0, "output": str(folder), **changes}
    (folder / "run.json").write_text(json.dumps(arguments))
    return folder


def test_a_page_of_two_runs_shows_what_differs_and_needs_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", learning_rate=2e-3, seed="<b>")
    assert main(["report", str(one), str(two), "--output", str(tmp_path / "out" / "page.html")]) == 0
    assert "wrote" in capsys.readouterr().out
    text = (tmp_path / "out" / "page.html").read_text()
    page = Page(text)
    assert page.tags.count("svg") == 4 + 2 * 2
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"<script|@import|url\((?!#)|<!DOCTYPE svg", text)
    for expected in ("Settings that differ", "learning_rate", "0.002", "<b>", "one, validation", "Composition of two"):
        assert expected in page.texts
    assert "output" not in page.texts


def test_each_source_of_a_mixture_has_a_curve(tmp_path: Path):
    folder = write_run(tmp_path / "mixed")
    lines = [{"step": step, "split": "train", "passes_web": step / 10, "passes_$code$": step / 40} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert main(["report", str(folder)]) == 0
    assert {"Passes over web", "Passes over $code$"} <= set(Page((folder / "report.html").read_text()).texts)


def test_one_run_is_written_beside_its_metrics(tmp_path: Path):
    run = write_run(tmp_path / "run")
    (run / "result.json").write_text(json.dumps({"validation_loss": 1.25, "steps": 30, "hardware": "a & b"}))
    assert main(["report", str(run)]) == 0
    texts = Page((run / "report.html").read_text()).texts
    assert {"1.25", "30", "a & b", "Settings", "0.001"} <= set(texts)


def test_lines_that_are_no_text_are_left_out(tmp_path: Path):
    """A disk that failed can leave anything in a file that was being written."""
    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"\n\xff\xfe\x00damaged\n7\n[]\nnull\n{}\n" + b'{"step": "3", "split": 1}\n')
        file.write(b'{"step": 9, "split": "train", "loss": "NaN", "grad_norm": true}\n')
        huge = b"1" + b"0" * 400
        file.write(b'{"step": 9, "split": "train", "loss": %b}\n{"step": %b, "split": "train"}\n' % (huge, huge))
        file.write(b"[" * 100_000 + b"\n")
    (run / "result.json").write_bytes(b"[" * 100_000)
    assert main(["report", str(run)]) == 0
    assert "run, validation" in Page((run / "report.html").read_text()).texts


def test_names_of_runs_are_no_formulas_and_hide_no_curve(tmp_path: Path):
    names = ("_hidden", "a$b$c", "$")
    runs = [str(write_run(tmp_path / name)) for name in names]
    assert main(["report", *runs, "--output", str(tmp_path / "page.html")]) == 0
    assert {f"{name}, train" for name in names} <= set(Page((tmp_path / "page.html").read_text()).texts)


def test_more_than_a_hundred_layers_are_drawn_in_their_order(monkeypatch: pytest.MonkeyPatch):
    drawn: list[list[float]] = []
    monkeypatch.setattr(page, "draw_layers", lambda values, label: drawn.extend(values.values()))
    record = {"step": 1, "split": "composition", **{f"{layer:02}.pre.gate_share": layer for layer in range(102)}}
    page.draw_health(ReportedRun("run", [record], {}, {}))
    assert drawn == [list(range(102))]


def test_curves_of_many_runs_differ_and_lie_above_their_names(monkeypatch: pytest.MonkeyPatch):
    drawn: list[Figure] = []
    monkeypatch.setattr(charts, "to_svg", lambda figure: drawn.append(figure) or "")
    for count in (2, 9):
        lines = [{"step": n, "split": split, "loss": 1.0} for n in range(40) for split in ("train", "validation")]
        runs = [ReportedRun(str(number), lines, {}, {}) for number in range(count)]
        charts.draw_curves(runs, ("train", "validation"), "loss", "Loss", log=count > 2)
    few, many = drawn
    assert [figure.axes[0].get_yscale() for figure in drawn] == ["linear", "log"]
    looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in many.axes[0].lines}
    assert len(looks) == 18
    assert few.axes[0].get_legend() is not None and not few.legends
    assert many.axes[0].get_legend() is None and len(many.legends[0].get_texts()) == 18


def test_only_a_page_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = write_run(tmp_path / "run")
    for _ in range(2):
        assert main(["report", str(run)]) == 0
    before = (run / "metrics.jsonl").read_text()
    os.mkfifo(pipe := tmp_path / "pipe")
    refused = {run / "metrics.jsonl": "is no page of this job", tmp_path: "is no file", pipe: "is no file"}
    for output, message in refused.items():
        assert main(["report", str(run), "--output", str(output)]) == 2
        assert message in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_text() == before


def test_a_pipe_in_place_of_the_measurements_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no metrics.jsonl with measurements" in capsys.readouterr().err


def test_runs_of_one_name_are_told_apart(tmp_path: Path):
    for parent in ("a", "b"):
        (tmp_path / parent).mkdir()
    runs = [str(write_run(tmp_path / parent / "run")) for parent in ("a", "b")]
    assert main(["report", *runs, "--output", str(tmp_path / "page.html")]) == 0
    assert set(runs) <= set(Page((tmp_path / "page.html").read_text()).texts)


def test_a_folder_without_measurements_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no metrics.jsonl" in capsys.readouterr().err
    run = write_run(tmp_path / "run")
    (tmp_path / "file").touch()
    assert main(["report", str(run), "--output", str(tmp_path / "file" / "page.html")]) == 2
    assert "cannot write" in capsys.readouterr().err
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    assert main(["report", str(run)]) == 2
    assert f"cannot read {run / 'metrics.jsonl'}: Is a directory" in capsys.readouterr().err
