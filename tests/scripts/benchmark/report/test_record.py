"""Records that are written and drawn again."""

import json
from pathlib import Path

import pytest
from cases.benchmark import run_benchmark

from dynattn.scripts import cli
from dynattn.scripts.benchmark.report import record as report
from dynattn.scripts.benchmark.report.tables import format_record

PLOTS = {"time.png", "memory.png", "ratios.png", "roofline.png", "profile.png"}


@pytest.mark.usefixtures("known_machine")
def test_a_record_draws_the_same_table_and_plots_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    with monkeypatch.context() as patch:
        patch.setattr(report, "draw_plots", lambda *given: drawn.append(given))
        options = ["--subjects", "long,profile", "--window", "16", "--shapes", "2x8@24,2x8@40", "--quick"]
        options += ["--implementations", "chunked,chunked-stepwise,chunked-plain,sdpa,chunks"]
        _, record = run_benchmark(tmp_path / "first", *options)
    again = ["benchmark", "--redraw", str(tmp_path / "first" / "record.json"), "--output", str(tmp_path / "second")]
    assert cli.main(again) == 0
    for name in ("record.json", "table.md"):
        assert (tmp_path / "first" / name).read_text() == (tmp_path / "second" / name).read_text()
    assert (tmp_path / "second" / "table.md").read_text() == format_record(record)
    assert [(json.loads(json.dumps(given[0])), given[1]) for given in drawn] == [(record, tmp_path / "first")]
    plots_there = {path.name: path.read_bytes() for path in (tmp_path / "second").glob("*.png")}
    assert plots_there.keys() == PLOTS
    assert all(content.startswith(b"\x89PNG") for content in plots_there.values())
    del record["load_average_after"]
    assert "not known after: the run was interrupted" in format_record(record)


def test_the_memory_of_calls_in_graphs_is_not_told() -> None:
    """The H100's record has them: of their memory a call takes nothing, since the graph has it already."""
    folder = Path(__file__).parents[4] / "model_cards/records/benchmark-gpu/h100/attention-4096"
    text = format_record(json.loads((folder / "record.json").read_text()))
    assert text == (folder / "table.md").read_text()
    assert "they have taken\ntheir memory before" in text
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| ")]
    memory = {row[1]: row[7] for row in rows if row[1] != "candidate" and "-" * 3 not in row[1]}
    assert memory["triton-graph"] == "" and float(memory["triton"]) > 1000
