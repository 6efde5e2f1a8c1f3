"""Long sequences, which are judged by some of their queries."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.benchmark import inputs_of, run_benchmark
from torch import Tensor

from dynattn.modeling.ops.dcmha import attention as dcmha
from dynattn.scripts.benchmark.harness.inputs import COMPOSED, reference_results
from dynattn.scripts.benchmark.subjects import long_sequences as long


def test_long_sequences_are_judged_by_some_of_their_queries(
    tmp_path: Path, register: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long, "LARGEST_MAP", 2 * 300 * 300 * 4 - 1)

    def errs_at_the_end(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> tuple[Tensor, None]:
        output, _ = dcmha.dcmha_eager(query, key, value, **arguments)
        return torch.cat([output[:, :-1], output[:, -1:] * 1.001], dim=1), None

    register("errs", errs_at_the_end)
    options = ("--subjects", "long", "--shapes", "2x8@300", "--implementations", "errs,chunked,sdpa,official,matmul")
    status, record = run_benchmark(tmp_path, *options)
    assert status == 1
    assert [case["window"] for case in record["cases"]] == [256, 256, None, None]
    for case in record["cases"]:
        rows = {row["name"]: row for row in case["rows"]}
        assert rows["chunked"]["verdict"]["correct"] and not rows["errs"]["verdict"]["correct"]
        assert ("failure" in rows["sdpa"]) == (case["window"] is not None)
        assert ("failure" in rows["official"]) == (case["passes"] == "forward+backward")
        assert "maps of all pairs of tokens" in rows["matmul"]["failure"]


@pytest.mark.usefixtures("known_machine", "no_plots")
def test_small_maps_of_all_pairs_of_tokens_are_measured(tmp_path: Path) -> None:
    shapes = ("2x8@64", "2x8@20")  # the queries compared before the middle and before the end overlap in the latter
    options = ("--subjects", "long", "--shapes", *shapes, "--implementations", "chunked,official,matmul")
    status, record = run_benchmark(tmp_path, *options)
    assert status == 0
    assert not any("failure" in row for case in record["cases"] if not case["window"] for row in case["rows"])


def test_the_reference_for_some_queries_has_the_gradients_of_all_that_they_depend_on() -> None:
    made = inputs_of(COMPOSED, 60, 60, 20, heads=2)
    chunks = [slice(10, 16), slice(50, 60)]
    checked = torch.cat([torch.arange(one.start, one.stop) for one in chunks])
    inputs = long.with_cotangent_at(made, checked)
    expected = dict(reference_results(inputs, torch.float64, backward=True))
    expected["output"] = expected["output"][:, checked]
    torch.testing.assert_close(dict(reference_results(inputs, torch.float64, backward=True, chunks=chunks)), expected)
