"""The report on plain `generate` beside a Llama."""

import json
from pathlib import Path

import pytest

from dynattn.scripts.benchmark.generate_report import format_table, main

RECORD = Path(__file__).parents[3] / "model_cards" / "records" / "serving" / "generate"


def test_a_small_run_writes_a_record_and_its_table(tmp_path: Path):
    sizes = {"rounds": 2, "context": 8, "new": 4, "layers": 1, "heads": 2, "width": 8}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    assert main([str(tmp_path / "report"), *words]) == 0
    record = json.loads((tmp_path / "report" / "record.json").read_text())
    assert list(record["milliseconds"]) == ["Llama", "DCFormer without composition", "DCFormer"]
    assert all(len(samples) == 2 and min(samples) > 0 for samples in record["milliseconds"].values())
    table = (tmp_path / "report" / "table.md").read_text()
    assert "| Llama | " in table and "| 1.000 | 1.000 to 1.000 |" in table


@pytest.mark.parametrize("words", [("--new", "1"), ("--rounds", "0")])
def test_numbers_that_leave_nothing_to_measure_are_told(
    words: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "report"), *words])
    assert f"{words[0]}={words[1]} must be at least {int(words[1]) + 1}" in capsys.readouterr().err


def test_the_committed_table_is_the_records():
    record = json.loads((RECORD / "record.json").read_text())
    assert (RECORD / "table.md").read_text() == format_table(record)
