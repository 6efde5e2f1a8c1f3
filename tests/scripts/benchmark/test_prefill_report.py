"""The report on packed prefills: small models, a record and its table."""

import json
from pathlib import Path

import pytest

from dynattn.scripts.benchmark.prefill_report import draw_lengths, format_table, main


def test_lengths_are_from_8_to_the_longest() -> None:
    lengths = draw_lengths(200, 512)
    assert (lengths[0], max(lengths)) == (512, 512)
    assert 8 <= min(lengths) < 12
    assert sorted(lengths)[100] < 100  # as many below the geometric mean as above it


def test_a_longest_prompt_below_the_shortest_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--longest", "7"])
    assert "--longest=7 must be at least 8" in capsys.readouterr().err


def test_both_ways_are_measured_in_turns_and_told_in_a_table(tmp_path: Path) -> None:
    sizes = {"rounds": 2, "longest": 24, "prompts": 3, "layers": 1, "heads": 2, "width": 8}
    assert main([str(tmp_path), *(word for name, size in sizes.items() for word in (f"--{name}", str(size)))]) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    ways = [f"{model}, {way}" for model in ("DCFormer without composition", "DCFormer") for way in ("padded", "packed")]
    assert list(record["milliseconds"]) == ways
    assert {len(samples) for samples in record["milliseconds"].values()} == {2}
    record["milliseconds"]["DCFormer, padded"], record["milliseconds"]["DCFormer, packed"] = [8.0, 4.0], [2.0, 2.0]
    table = format_table(record)
    assert "| DCFormer | packed | 2 | 2 | 0.375 | 0.250 to 0.500 |" in table
    assert (tmp_path / "table.md").read_text().startswith("`python -m dynattn.scripts.benchmark.prefill_report FOLDER")
