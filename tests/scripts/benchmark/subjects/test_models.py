"""Benchmarks of models."""

from pathlib import Path

import pytest
import torch
from cases.benchmark import row_of, run_benchmark

from dynattn.modeling.ops.dcmha.chunked import passes
from dynattn.scripts.benchmark.subjects import models


def test_a_reference_whose_maps_would_not_fit_is_computed_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "FORWARD_ELEMENTS", 2 * 64**2 - 1)
    monkeypatch.setattr(models, "BACKWARD_ELEMENTS", 2 * 64**2)
    references = []

    def model(problem: models.ModelProblem, function: str, implementation: str | None, *dtype: torch.dtype) -> object:
        references.extend(implementation for _ in dtype)  # only references are asked for in a dtype
        return original(problem, function, implementation, *dtype)

    original = models.ModelProblem.model
    monkeypatch.setattr(models.ModelProblem, "model", model)
    status, record = run_benchmark(
        tmp_path, "--subjects", "positions", "--shapes", "2x8@64", "--implementations", "rope,plain-alibi,plain-rope"
    )
    assert status == 0
    forward, backward = record["cases"]
    assert all(row["verdict"]["correct"] for case in (forward, backward) for row in case["rows"])
    twice = 2 * len(forward["rows"])  # in float64, and in the dtype that is measured
    assert references == ["chunked"] * twice + ["eager"] * twice


def test_compiled_code_is_not_judged_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "BACKWARD_ELEMENTS", 0)  # so that the reference is `chunked`, too
    attend = passes.attend_in_c
    monkeypatch.setattr(passes, "attend_in_c", lambda *arguments: attend(*arguments) * 1.5)
    options = ("--subjects", "training", "--shapes", "2x8@64", "--layers", "1", "--vocabulary", "64")
    status, record = run_benchmark(tmp_path, *options, "--implementations", "chunked,chunked-stepwise,sdpa")
    correct = {
        name: row_of(record, name, "forward+backward")["verdict"]["correct"]
        for name in ("chunked", "chunked-stepwise", "sdpa")
    }
    assert status == 1 and correct == {"chunked": False, "chunked-stepwise": True, "sdpa": True}
