"""Reads the files of a run that a report shows."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.atomic_file import read_json_if_whole
from ..common.errors import UserError
from ..common.metric_records import MetricRecord, is_number, read_metrics

METRICS, ARGUMENTS, RESULT = "metrics.jsonl", "run.json", "result.json"


@dataclass(frozen=True)
class ReportedRun:
    """A run: its name, the records of its metrics, its arguments and, once it is finished, its result."""

    name: str
    records: Sequence[MetricRecord]
    arguments: dict[str, Any]
    result: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, name: str) -> "ReportedRun":
        """Reads the folder of a run.

        Raises:
            UserError: it holds no measurements.
        """
        records = read_metrics(folder / METRICS)
        if not records:
            raise UserError(
                f"{folder} holds no {METRICS} with measurements; give the output folder of dynattn pretrain"
            )
        return cls(name, records, read_json_if_whole(folder / ARGUMENTS), read_json_if_whole(folder / RESULT))

    def series(self, split: str, field: str) -> tuple[list[int], list[float]]:
        """The steps at which `field` of `split` was measured, and its values."""
        found = [(r["step"], r[field]) for r in self.records if r["split"] == split and is_number(r.get(field))]
        return [step for step, _ in found], [value for _, value in found]

    def fields(self, split: str) -> list[str]:
        """The names of all that was measured for `split`, in the order in which they first occur."""
        return list(dict.fromkeys(name for record in self.records if record["split"] == split for name in record))


def read_runs(folders: Sequence[Path]) -> list[ReportedRun]:
    """Reads all runs. A run has the name of its folder or, if two folders have the same name, its path."""
    names = [folder.resolve().name for folder in folders]
    distinct = len(set(names)) == len(names)
    return [ReportedRun.read(f, name if distinct else str(f)) for f, name in zip(folders, names, strict=True)]


def differing(runs: Sequence[ReportedRun]) -> list[str]:
    """The names of the arguments, other than the output folder, in which runs differ; for a single run, all it has."""
    names = dict.fromkeys(name for run in runs for name in run.arguments if name != "output")
    if len(runs) == 1:
        return [name for name in names if runs[0].arguments[name] is not None]
    return [name for name in names if len({json.dumps(run.arguments.get(name)) for run in runs}) > 1]
