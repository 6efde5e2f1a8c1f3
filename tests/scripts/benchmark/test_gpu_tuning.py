"""What the GPU preset tunes, tried on a CPU."""

from types import SimpleNamespace

import pytest
from cases.triton_marks import interpreted

from dynattn.modeling.ops.dcmha.triton import tuning as kernel_tuning
from dynattn.scripts.benchmark import gpu_tuning
from dynattn.scripts.benchmark.arguments import BenchmarkArguments
from dynattn.scripts.benchmark.gpu_tuning import make_trial
from dynattn.scripts.benchmark.harness.settings import read_settings
from dynattn.scripts.benchmark.harness.tuning import TrialLog, TunableConstant, tune


@pytest.mark.parametrize("constants", [gpu_tuning.HEAD_BY_HEAD_CONSTANTS, gpu_tuning.TENSOR_CORE_CONSTANTS])
def test_the_tuned_constants_are_those_of_the_kernels(constants: tuple[TunableConstant, ...]) -> None:
    for constant in (gpu_tuning.FAMILY, *constants):
        value = constant.current(kernel_tuning)
        assert all(type(value) is type(candidate) for candidate in constant.values)
        assert not isinstance(value, tuple) or value in constant.values


@pytest.mark.parametrize(("of_loops", "expected"), [(0.5, "TILES[dcmha_probs]"), (2.0, "TURNS")])
def test_only_the_faster_kernels_are_tuned(of_loops: float, expected: str) -> None:
    tuning = gpu_tuning.tune_the_faster(
        lambda: of_loops if kernel_tuning.FEWEST_HEADS > 32 else 1.0, lambda: True, TrialLog()
    )
    assert tuning.finished and (tuning.best[gpu_tuning.FAMILY] > 32) == (of_loops < 1)
    tried = {one["constant"] for one in tuning.trials}
    assert expected in tried
    assert ("TURNS" in tried) != ("TILES[dcmha_probs]" in tried)


def test_the_trial_runs_the_candidate_with_the_constants_and_refuses_wrong_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = read_settings(BenchmarkArguments())
    trial = make_trial(settings, (("4x16@24", None), ("4x16@24", 8)), "chunked")
    assert trial() > 0
    monkeypatch.setattr(gpu_tuning, "judge", lambda *_: SimpleNamespace(correct=False))
    with pytest.raises(ValueError, match="results are wrong"):
        trial()


@interpreted
@pytest.mark.slow
def test_the_triton_path_gives_the_same_with_all_constants_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which `pinned` has deleted
    settings = read_settings(BenchmarkArguments())
    monkeypatch.setattr(gpu_tuning, "TRIAL_SAMPLES", 1)
    trial = make_trial(settings, (("2x16@40", 8),), "triton")
    tiles = TunableConstant("TILES", ((8, 16, 4),), "dcmha_probs")
    constants = (TunableConstant("ROWS", (16,)), TunableConstant("BLOCK", (8,)), tiles)
    tuning = tune(kernel_tuning, constants, trial, lambda: True, TrialLog())
    assert [one["constant"] for one in tuning.trials if one["seconds"] > 0] == [
        "as it is",
        "ROWS",
        "BLOCK",
        "TILES[dcmha_probs]",
    ]
