"""The Triton kernels compiled for GPUs that need not be there: every configuration fits, without spilling registers."""

import json
from pathlib import Path
from typing import Any

import pytest

from dynattn.modeling.ops.dcmha.triton.tuning import MATRIX_MEMORY
from dynattn.scripts.benchmark.kernel_configurations import (
    CONFIGURATIONS,
    DecodeConfiguration,
    HeadByHeadConfiguration,
    TensorCoreConfiguration,
)

triton = pytest.importorskip("triton")
kernel_report = pytest.importorskip("dynattn.scripts.benchmark.kernel_report")
kernel_compilation = pytest.importorskip("dynattn.scripts.benchmark.kernel_compilation")

RECORD = Path(__file__).parents[4] / "model_cards" / "records" / "triton-compiled"
# Bytes that a thread may spill: a few values outside of the loops.
SPILLED, SPILLED_IN_DECODING = 8, 16
# On the tensor cores it is some values of every turn, by the number of heads.
SPILLED_ON_TENSOR_CORES = {16: 80, 32: 1100}
# Instructions of threads for a (head, query, key), with ten percent to spare.
INSTRUCTIONS = {
    "all terms, 16 heads": {
        "dcmha_statistics": 32,
        "dcmha_probs": 42,
        "dcmha_backward_post": 110,
        "dcmha_backward_pre": 97,
    },
    "matrices, 16 heads": {
        "dcmha_matrix_statistics": 33,
        "dcmha_matrix_probs": 31,
        "dcmha_matrix_backward_post": 81,
        "dcmha_matrix_backward_pre": 67,
    },
}


@pytest.fixture(scope="module", params=kernel_report.CAPABILITIES)
def compiled(request: pytest.FixtureRequest) -> tuple[int, dict[str, Any]]:
    """A compute capability and, by configuration and kernel, what was compiled for it."""
    return request.param, kernel_report.compile_elsewhere(request.param)


@pytest.mark.parametrize(
    ("argv", "message"),
    [([], "give a folder, or --capability"), (["--capability", "90", "--configurations", "none"], "invalid choice")],
)
def test_wrong_options_are_an_error(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kernel_report.main(argv)
    assert message in capsys.readouterr().err


def test_the_instructions_of_a_known_loop_are_counted() -> None:
    taken = kernel_report.compile_elsewhere(90, "axpy")["axpy"]["axpy"]
    assert taken["by_class"]["float"] == 1  # a multiplication and an addition in one
    assert taken["by_class"]["memory"] == 3 / 4  # four entries to a load or a store
    assert sum(taken["by_class"].values()) == pytest.approx(taken["instructions"], abs=0.1)
    assert 1.75 < taken["instructions"] < 4


@pytest.mark.slow
def test_the_main_configurations_have_few_instructions(compiled: tuple[int, Any]) -> None:
    capability, takes = compiled
    if capability == 90:
        for configuration, limits in INSTRUCTIONS.items():
            for name, limit in limits.items():
                taken = takes[configuration][name]
                assert taken["instructions"] + taken["outside"] <= limit


@pytest.mark.slow
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_kernels_fit_and_do_not_spill(configuration: str, compiled: tuple[int, Any]) -> None:
    capability, takes = compiled
    kind = CONFIGURATIONS[configuration]
    if isinstance(kind, HeadByHeadConfiguration):
        summing = {"dcmha_distance_sums"} if kind.has_bias or kind.has_gain else set()
        assert takes[configuration].keys() == kernel_compilation.HEAD_BY_HEAD.keys() | {"dcmha_merge"} | summing
    limit = SPILLED_IN_DECODING if isinstance(kind, DecodeConfiguration) else SPILLED
    if isinstance(kind, HeadByHeadConfiguration) and kind.has_gain:
        limit *= 2
    if isinstance(kind, TensorCoreConfiguration):
        limit = SPILLED_ON_TENSOR_CORES[kind.padded]
    for kernel in takes[configuration].values():
        assert kernel["shared"] <= kernel_compilation.SHARED_MEMORY[capability]
        assert kernel["spilled"] <= limit


@pytest.mark.slow
def test_up_to_16_heads_fit_where_shared_memory_is_scarce() -> None:
    """The kernels on the tensor cores, with what takes the most memory."""
    taken = kernel_report.compile_elsewhere(86, "matrices, rows in float32", "matrices, bias", "matrices, gain")
    most = max(kernel["shared"] for kernels in taken.values() for kernel in kernels.values())
    assert most <= MATRIX_MEMORY[16] < kernel_compilation.SHARED_MEMORY[86]


def test_every_configuration_is_in_the_record() -> None:
    recorded = json.loads((RECORD / "record.json").read_text())["capabilities"]
    assert {name: list(kernels) for name, kernels in recorded.items()} == {
        f"sm_{capability}": list(CONFIGURATIONS) for capability in kernel_report.CAPABILITIES
    }


def test_no_recorded_kernel_takes_more_shared_memory_than_the_constant_says() -> None:
    for kernels in json.loads((RECORD / "record.json").read_text())["capabilities"].values():
        for name, kind in CONFIGURATIONS.items():
            if isinstance(kind, TensorCoreConfiguration):
                assert max(kernel["shared"] for kernel in kernels[name].values()) <= MATRIX_MEMORY[kind.padded]


def test_the_table_is_the_one_of_the_record() -> None:
    record = json.loads((RECORD / "record.json").read_text())
    assert (RECORD / "table.md").read_text() == kernel_report.as_markdown(record)


@pytest.mark.slow
def test_the_record_says_what_these_kernels_take(compiled: tuple[int, Any]) -> None:
    capability, takes = compiled
    record = json.loads((RECORD / "record.json").read_text())
    if record["versions"]["triton"] != triton.__version__:
        pytest.skip(f"the record is of Triton {record['versions']['triton']}, not {triton.__version__}")
    assert takes == record["capabilities"][f"sm_{capability}"]
