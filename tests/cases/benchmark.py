"""Runs of `dynattn benchmark` and inputs of its op, for several test files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dynattn.scripts import cli
from dynattn.scripts.benchmark.arguments import BenchmarkArguments
from dynattn.scripts.benchmark.harness import inputs
from dynattn.scripts.benchmark.harness.inputs import OpInputs
from dynattn.scripts.benchmark.harness.settings import read_settings
from dynattn.scripts.benchmark.harness.shapes import Shape


def run_benchmark(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Runs the job in two rounds and returns its status and its record."""
    status = cli.main(["benchmark", "--output", str(folder), "--rounds", "2", *options])
    return status, json.loads((folder / "record.json").read_text())


def row_of(record: dict[str, Any], name: str, passes: str = "forward") -> dict[str, Any]:
    """The row of a candidate, which must be in a single case with these passes."""
    rows = [row for case in record["cases"] if case["passes"] == passes for row in case["rows"]]
    (found,) = (row for row in rows if row["name"] == name)
    return found


def inputs_of(
    function: str,
    queries: int,
    keys: int,
    window: int | None = None,
    *,
    heads: int = 4,
    width: int = 8,
    dtype: torch.dtype = torch.float64,
) -> OpInputs:
    """Random inputs of one function, batch 2, on the CPU."""
    settings = replace(read_settings(BenchmarkArguments(batch_size=2, seed=3)), dtype=dtype)
    return inputs.inputs_of(Shape(heads, width, keys), settings, queries=queries, window=window)[function]
