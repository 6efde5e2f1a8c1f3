"""The compatibility that the documentation tells of is that of the record."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "model_cards/records/compatibility"


def test_the_table_of_the_record_is_the_one_in_the_documentation() -> None:
    assert (RECORD / "table.md").read_text() in (ROOT / "docs/support.md").read_text()


def test_every_failure_of_the_record_is_counted_in_its_table() -> None:
    rows = json.loads((RECORD / "record.json").read_text())
    lines = (RECORD / "table.md").read_text().splitlines()[2:]
    for row, line in zip(rows.values(), lines, strict=True):
        areas = row["areas"].values()
        assert line.startswith(f"| {row['versions']['python']} |")
        assert all(f"**{area['failed']} failed**" in line for area in areas if area["failures"])
        assert all(area["failed"] == len(area["failures"]) for area in areas)
