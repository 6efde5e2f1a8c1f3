"""Benchmarks of models."""

from pathlib import Path

import pytest
import torch
from cases.benchmark import row_of, run_benchmark

from dynattn.modeling.ops.dcmha.chunked import passes
from dynattn.scripts.benchmark.arguments import BenchmarkArguments
from dynattn.scripts.benchmark.harness.settings import read_settings
from dynattn.scripts.benchmark.harness.shapes import parse_shape
from dynattn.scripts.benchmark.subjects import models

pytestmark = pytest.mark.usefixtures("known_machine", "no_plots")
# A model of as many layers as it is given.
SMALL = ("--shapes", "2x8@64", "--vocabulary", "64", "--layers")


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
    options = ("--subjects", "positions", *SMALL, "2", "--implementations", "rope,plain-alibi,plain-rope")
    status, record = run_benchmark(tmp_path, *options)
    assert status == 0
    forward, backward = record["cases"]
    assert all(row["verdict"]["correct"] for case in (forward, backward) for row in case["rows"])
    twice = 2 * len(forward["rows"])  # in float64, and in the dtype that is measured
    assert references == ["chunked"] * twice + ["eager"] * twice


def test_compiled_code_is_not_judged_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "BACKWARD_ELEMENTS", 0)  # so that the reference is `chunked`, too
    attend = passes.attend_in_c
    monkeypatch.setattr(passes, "attend_in_c", lambda *arguments: attend(*arguments) * 1.5)
    options = ("--subjects", "training", *SMALL, "1", "--implementations", "chunked,chunked-stepwise,sdpa")
    status, record = run_benchmark(tmp_path, *options)
    (case,) = record["cases"]
    correct = {row["name"]: row["verdict"]["correct"] for row in case["rows"]}
    assert status == 1 and correct == {"chunked": False, "chunked-stepwise": True, "sdpa": True}


def test_layers_with_and_without_a_window_beside_a_plain_model_without_any(tmp_path: Path) -> None:
    options = ("--subjects", "training", *SMALL, "2", "--window", "16", "--layer_types", "LG")
    status, record = run_benchmark(tmp_path, *options, "--implementations", "chunked,sdpa,sdpa-global")
    composed, plain, without = (row_of(record, name, "forward+backward") for name in ("chunked", "sdpa", "sdpa-global"))
    assert status == 0 and all(row["verdict"]["correct"] for row in (composed, plain, without))
    assert record["cases"][0]["window"] == 16 and record["cases"][0]["note"] == "layers LG"
    pairs, pairs_in_window = 64 * 65 // 2, 64 * 16 - 16 * 15 // 2
    # One layer of two has the window. Scores and outputs of 16 channels take four operations for a pair, and the
    # backward pass takes twice as many.
    assert without["flops"] - plain["flops"] == 3 * 4 * 16 * (pairs - pairs_in_window)


def test_on_a_gpu_compiled_models_replay_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(models.DCFormerForCausalLM, "compile", lambda model, mode: modes.append(mode))
    arguments = BenchmarkArguments(device="cpu", layers=1, vocabulary=64, layer_types="LG", window=16)
    case = next(models.training_cases(parse_shape("2x8@32"), read_settings(arguments)))
    by_name = {one.name: one for one in models.training_candidates(torch.device("cuda"))}
    for name in ("sdpa", "sdpa-global"):
        plain, graph = (by_name[one].prepare(case.problem)() for one in (name, f"{name}-graph"))
        torch.testing.assert_close(graph, plain, rtol=0, atol=0)
    assert modes == ["reduce-overhead"] * 2
    assert by_name["triton-graph"].role == "ours"


def test_a_model_without_windows_is_no_other_where_there_are_none(tmp_path: Path) -> None:
    _, record = run_benchmark(tmp_path, "--quick", "--subjects", "prefill", *SMALL, "1")
    assert "sdpa-global" in record["left_out"]
