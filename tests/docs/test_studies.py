"""What the tables of studies and cards tell is what the records hold, rounded once."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "model_cards" / "records"
PAGES = sorted(
    path.relative_to(ROOT)
    for folder in ("docs/studies", "model_cards")
    for path in (ROOT / folder).glob("*.md")
    if " ± " in path.read_text()
)


def measured() -> Iterator[list[float]]:
    """The values over seeds of every cell that a record has: losses, metrics of tasks, scores of RCMHA's comparison."""
    for path in RECORDS.rglob("record.json"):
        record = json.loads(path.read_text())
        arms = record["arms"].values() if isinstance(record.get("arms"), dict) else []
        yield from ([run["validation"][-1]["loss"] for run in arm["runs"]] for arm in arms if isinstance(arm, dict))
        for task in record["results"].values() if isinstance(record.get("results"), dict) else []:
            yield from (metric["values"] for arm in task["arms"].values() for metric in arm["metrics"].values())
    for first in RECORDS.glob("tiny-shakespeare/runs/*/*-seed-0.json"):
        seeds = first.parent.glob(first.name.replace("-0.json", "-?.json"))
        runs: list[dict[str, Any]] = [json.loads(path.read_text()) for path in seeds]
        for scores in ("validation", "train", "all_training_batches"):
            for score in ("accuracy", "bits_per_character"):
                yield [run[scores][score] for run in runs]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_means_and_deviations_are_those_of_a_record(page: Path) -> None:
    told = re.findall(r"^\|.* ± .*$", (ROOT / page).read_text(), flags=re.M)
    cells = {cell for row in told for cell in re.findall(r"\d\.\d+ ± \d\.\d+", row)}
    held = {f"{mean(values):.{n}f} ± {stdev(values):.{n}f}" for values in measured() for n in (3, 4)}
    assert sorted(cells - held) == []
