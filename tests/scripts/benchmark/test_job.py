"""Whole runs of the benchmark: their records, and what they refuse."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.benchmark import row_of, run_benchmark
from cases.clock import Clock
from torch import Tensor

from dynattn.modeling.ops.dcmha import attention as dcmha
from dynattn.scripts import cli
from dynattn.scripts.benchmark.arguments import BenchmarkArguments
from dynattn.scripts.benchmark.harness import process
from dynattn.scripts.benchmark.job import measure_to_folder
from dynattn.scripts.benchmark.report import plots
from dynattn.scripts.benchmark.report.tables import format_record
from dynattn.scripts.benchmark.subjects import attention
from dynattn.scripts.benchmark.subjects.selection import SUBJECTS
from dynattn.scripts.common import figures, measuring
from dynattn.scripts.common.folder_lock import FolderLock


def test_a_run_that_is_killed_leaves_the_cases_before(tmp_path: Path, register: Callable[..., None]) -> None:
    def attend(query: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        if query.shape[2] == 24:
            raise KeyboardInterrupt
        return dcmha.COMPOSING_IMPLEMENTATIONS["eager"](query, *arguments, **keywords)

    register("brittle", attend)
    arguments = ("--quick", "--subjects", "attention", "--shapes", "2x8@16", "2x8@24")
    status, record = run_benchmark(tmp_path, *arguments, "--implementations", "eager", "brittle", "sdpa")
    assert status == 128 + signal.SIGINT
    assert {case["shape"]["length"] for case in record["cases"]} == {16}


def test_two_commands_do_not_share_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FolderLock(tmp_path / ".lock"):
        assert cli.main(["benchmark", "--quick", "--subjects", "attention", "--output", str(tmp_path)]) == 2
    assert "is in use by process" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_plots", "known_machine")
def test_a_second_command_measures_only_what_the_record_lacks(
    tmp_path: Path,
    register: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths: list[int] = []
    is_killed = [True]

    def attend(query: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        if query.shape[2] == 24 and is_killed:
            raise KeyboardInterrupt
        lengths.append(query.shape[2])
        return dcmha.COMPOSING_IMPLEMENTATIONS["eager"](query, *arguments, **keywords)

    register("brittle", attend)
    options = ("--quick", "--subjects", "attention", "--shapes", "2x8@16", "2x8@24", "--implementations", "brittle")
    status, before = run_benchmark(tmp_path, *options, "sdpa", "--resume")
    assert status == 128 + signal.SIGINT
    is_killed.clear()
    lengths.clear()
    status, record = run_benchmark(tmp_path, *options, "sdpa", "--resume")
    assert status == 0 and set(lengths) == {24}
    assert [case["shape"]["length"] for case in record["cases"]] == [16, 16, 24, 24]
    capsys.readouterr()
    with monkeypatch.context() as patched:
        patched.delattr(attention, "inputs_of")  # which takes long, and is not called for what is there
        assert run_benchmark(tmp_path, *options, "sdpa", "--resume") == (0, record)
    assert "is complete, so nothing is measured" in capsys.readouterr().out
    assert cli.main(["benchmark", "--output", str(tmp_path), "--rounds", "2", *options, "eager", "--resume"]) == 2
    assert "was made with settings" in capsys.readouterr().err
    assert record["cases"][:2] == before["cases"]
    table = (tmp_path / "table.md").read_text()
    (tmp_path / "table.md").write_text("of the record before\n")  # as a process leaves it that is killed before it
    assert run_benchmark(tmp_path, *options, "sdpa", "--resume") == (0, record)
    assert (tmp_path / "table.md").read_text() == table
    assert record["started_before"] == [before["started"]]
    lengths.clear()
    assert run_benchmark(tmp_path, *options, "sdpa", "--resume") == (0, record)
    more = [*options[:5], "2x8@32", *options[5:]]
    assert {case["shape"]["length"] for case in run_benchmark(tmp_path, *more, "sdpa", "--resume")[1]["cases"]} == {
        16,
        24,
        32,
    }
    assert set(lengths) == {32}
    lengths.clear()
    assert run_benchmark(tmp_path, *options, "sdpa", "--resume", "--seed", "1")[0] == 2
    assert "was made with settings {'seed': 0" in capsys.readouterr().err
    (tmp_path / "record.json").write_text(json.dumps(record | {"commit": "another"}))
    assert run_benchmark(tmp_path, *options, "sdpa", "--resume")[0] == 2
    assert "was made with commit another, not" in capsys.readouterr().err
    assert not lengths


@pytest.mark.usefixtures("no_plots", "known_machine")
def test_a_record_of_several_commands_tells_all_of_them(tmp_path: Path) -> None:
    """A table that names the last command alone would say that it had measured the cases of the others."""
    for subject in ("attention", "decode", "decode"):
        assert run_benchmark(tmp_path, "--quick", "--subjects", subject, "--shapes", "2x8@16", "--resume")[0] == 0
    record = json.loads((tmp_path / "record.json").read_text())
    table = (tmp_path / "table.md").read_text()
    (before,), (started,) = record["command_before"], record["started_before"]
    assert table.startswith(f"`{' '.join(before)}`, then `{' '.join(record['command'])}`\n\n{started}, then ")
    assert {"attention", "decode"} == {case["subject"] for case in record["cases"]}
    assert {"talking-heads-compiled", "sdpa-compiled"} <= set(record["left_out"])


@pytest.mark.usefixtures("no_plots")
def test_a_tiny_run_of_every_subject_leaves_record_and_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--shapes", "2x8@40", "--layers", "1", "--vocabulary", "64")
    status, record = run_benchmark(tmp_path, "--quick", *sizes, "--subjects", *SUBJECTS)
    assert status == 0
    assert {case["subject"] for case in record["cases"]} == set(SUBJECTS)
    assert record["threads"] == 1
    assert record["allocator"] == process.ALLOCATOR
    assert record["versions"]["torch"] == torch.__version__
    for case in record["cases"]:
        assert len({row["name"] for row in case["rows"]}) == len(case["rows"])
        assert all(row["failure"].startswith("ValueError") for row in case["rows"] if "failure" in row)
        case["rows"] = [row for row in case["rows"] if "failure" not in row]
        assert all(row["verdict"]["correct"] and row["timing"]["n"] == 2 for row in case["rows"])
        assert not [row["name"] for row in case["rows"] if row["name"].endswith("-compiled")]
        (baseline,) = (row for row in case["rows"] if row["is_baseline"])
        plain = [row["timing"]["median"] for row in case["rows"] if row["role"] == "plain"]
        assert baseline["timing"]["median"] == min(plain)
        for row in case["rows"]:
            assert row["ratio"] == row["timing"]["median"] / min(plain)
            assert row["peak_bytes"] > 0
    assert {path.name for path in tmp_path.iterdir()} == {"record.json", "table.md"}
    assert "official-compiled" in record["left_out"]
    table = (tmp_path / "table.md").read_text()
    assert f"Left out: {', '.join(record['left_out'])}." in table
    assert table.count("| candidate") == len(record["cases"])
    assert "**attention, forward+backward: 2x8, 40 tokens, batch 1, float32**" in table
    shown = capsys.readouterr().out
    assert all(line in shown for line in table.splitlines() if line.startswith(("| ", "**")))


def drops_post(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> tuple[Tensor, None]:
    output, _ = dcmha.dcmha_eager(query, key, value, **{**arguments, "post": None})
    return output, None


def forgets_a_gradient(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> tuple[Tensor, None]:
    output, _ = dcmha.dcmha_eager(query, key.detach() + 0 * key, value, **arguments)
    return output, None


def makes_one_nan(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> tuple[Tensor, None]:
    output, _ = dcmha.dcmha_eager(query, key, value, **arguments)
    return output * torch.ones_like(output).index_fill(1, torch.tensor([3]), torch.nan), None


def rounds_to_bfloat16(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> tuple[Tensor, None]:
    output, _ = dcmha.dcmha_eager(query, key, value, **arguments)
    return output.bfloat16().to(output.dtype), None


@pytest.mark.parametrize(
    ("attend", "passes"),
    [
        (drops_post, "forward"),
        (makes_one_nan, "forward"),
        (rounds_to_bfloat16, "forward"),
        (forgets_a_gradient, "forward+backward"),
    ],
)
def test_a_wrong_implementation_is_refused_a_ratio(
    tmp_path: Path, register: Callable[..., None], attend: Callable[..., Any], passes: str
) -> None:
    register("skewed", attend)
    options = ("--subjects", "attention", "--shapes", "2x8@40", "--implementations", "skewed,eager,sdpa")
    status, record = run_benchmark(tmp_path, *options)
    assert status == 1
    row = row_of(record, "skewed", passes)
    assert not row["verdict"]["correct"]
    assert (row["verdict"]["excess"] is None) if attend is makes_one_nan else row["verdict"]["excess"] > 100
    json.dumps(record, allow_nan=False)  # other readers of JSON know no infinity
    assert not {"ratio", "tokens_per_second", "flops_per_second"} & set(row)
    assert row_of(record, "eager", passes)["ratio"] > 0
    lines = format_record(record).split(passes + ":")[1].splitlines()
    cells = [cell.strip() for cell in next(line for line in lines if line.startswith("| skewed ")).split("|")[1:-1]]
    assert cells[5] == "wrong"
    assert "wrong: skewed: " in format_record(record)


def test_a_wrong_gradient_alone_leaves_the_forward_ratio(tmp_path: Path, register: Callable[..., None]) -> None:
    register("skewed", forgets_a_gradient)
    options = ("--subjects", "attention", "--shapes", "2x8@40", "--implementations", "skewed,sdpa")
    _, record = run_benchmark(tmp_path, *options)
    assert row_of(record, "skewed")["ratio"] > 0
    assert row_of(record, "skewed", "forward+backward")["verdict"]["where"] == "grad key"


def test_a_wrong_plain_attention_is_no_baseline(tmp_path: Path, register: Callable[..., None]) -> None:
    register("empty", lambda query, key, value, **_: (torch.zeros_like(query).transpose(1, 2), None))
    options = ("--subjects", "attention", "--shapes", "2x8@128", "--implementations", "empty-plain,matmul,eager")
    status, record = run_benchmark(tmp_path, *options)
    assert status == 1
    assert "ratio" not in row_of(record, "empty-plain")
    assert row_of(record, "matmul")["is_baseline"]


def test_what_is_wrong_after_the_first_calls_only_is_found(tmp_path: Path, register: Callable[..., None]) -> None:
    calls = []

    def tires(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> tuple[Tensor, None]:
        calls.append(None)
        return (drops_post if len(calls) > 4 else dcmha.dcmha_eager)(query, key, value, **arguments)[0], None

    register("tires", tires)
    options = ("--subjects", "attention", "--shapes", "2x8@40", "--implementations", "tires,sdpa")
    status, record = run_benchmark(tmp_path, *options)
    assert status == 1
    assert not row_of(record, "tires")["verdict"]["correct"]


@pytest.mark.parametrize(("error", "status"), [(ValueError, 0), (RuntimeError, 1)])
def test_declining_is_no_fault_and_breaking_is(
    tmp_path: Path, register: Callable[..., None], error: type[Exception], status: int
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise error("head_dim 8 is not supported\nand more")

    register("refuses", refuses)
    options = ("--subjects", "attention", "--shapes", "2x8@40", "--implementations", "refuses,sdpa")
    found, record = run_benchmark(tmp_path, *options)
    assert found == status
    assert row_of(record, "refuses")["failure"] == f"{error.__name__}: head_dim 8 is not supported"
    assert "not measured: refuses: " in (tmp_path / "table.md").read_text()


@pytest.mark.usefixtures("known_machine", "no_plots")
def test_a_reference_that_fails_is_no_fault_of_the_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.dtype] = []

    def fails(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments[1])
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(attention, "reference_results", fails)
    options = ("--subjects", "attention", "--shapes", "2x8@16", "--implementations", "eager,chunked,sdpa")
    status, record = run_benchmark(tmp_path, *options)
    assert status == 1
    for case in record["cases"]:
        assert {row["failure"] for row in case["rows"]} == {"the reference fails: OutOfMemoryError: no memory"}
    assert len(calls) == 2 * 2, "once for each function and case"


@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize(
    ("subject", "shape", "message"),
    [
        ("block", "3x7@16", "block cannot have the shape 3x7@16: head_dim (7) must be even"),
        ("step", "4x32@1", "step cannot have the shape 4x32@1: its last token needs others before it"),
        ("prefill", "1x8@16", "prefill cannot have the shape 1x8@16: num_attention_heads (1)"),
    ],
)
def test_a_shape_that_no_model_has_is_told(
    tmp_path: Path, subject: str, shape: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["benchmark", "--output", str(tmp_path), "--subjects", subject, "--shapes", shape]) == 2
    assert message in capsys.readouterr().err


def test_a_run_that_measures_nothing_fails(tmp_path: Path, register: Callable[..., None]) -> None:
    def declines(*arguments: Any, **options: Any) -> Any:
        raise ValueError("not here")

    register("modest", declines)
    options = ("--subjects", "attention", "--shapes", "2x8@16", "--implementations")
    assert run_benchmark(tmp_path / "alone", *options, "modest")[0] == 1
    assert run_benchmark(tmp_path / "beside", *options, "modest,sdpa")[0] == 0


def test_who_is_over_the_budget_is_left_out_here_and_with_more_tokens(
    tmp_path: Path, register: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, clock = [], Clock(tick=0.001)
    monkeypatch.setattr(measuring, "time", clock)

    def dawdles(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> tuple[Tensor, None]:
        lengths.append(query.shape[2])
        clock.work(0.3 if query.shape[2] > 40 else 0)
        return dcmha.dcmha_eager(query, key, value, **arguments)[0], None

    register("dawdles", dawdles)
    options = ("--subjects", "attention", "--shapes", "2x8@30,2x8@60,2x8@90", "--budget", "0.2")
    status, record = run_benchmark(tmp_path, *options, "--implementations", "dawdles,sdpa")
    assert status == 0
    shown = [row for case in record["cases"] for row in case["rows"] if row["name"] == "dawdles"]
    assert ["timing" in row for row in shown] == [True, True, False, False, False, False]
    assert shown[2]["failure"] == "over the budget: its first call took 0.301 s, more than 0.2 s"
    assert shown[4]["failure"] == "over the budget with fewer tokens already"
    assert lengths.count(60) == 2
    assert 90 not in lengths
    assert "not measured: dawdles: over the budget: " in (tmp_path / "table.md").read_text()


def test_cases_after_the_end_are_left_out_by_name(tmp_path: Path, register: Callable[..., None]) -> None:
    arguments = BenchmarkArguments(subjects=["attention"], shapes=["2x8@40"], implementations=["sdpa"], rounds=1)
    assert measure_to_folder([], arguments, tmp_path, end=time.monotonic() - 1)
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["cases"] == []
    assert record["cases_left_out"][0] == "attention, forward: 2x8, 40 tokens, batch 1, float32"
    assert "No time was left for: attention, forward: 2x8" in (tmp_path / "table.md").read_text()


@pytest.mark.usefixtures("known_machine")
def test_a_machine_without_matplotlib_measures_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for module in (plots, figures):
        monkeypatch.delitem(sys.modules, module.__name__)
    options = ("--subjects", "decode", "--shapes", "2x8@16", "--implementations", "sdpa,chunked")
    folder = tmp_path / "a record"
    status, _ = run_benchmark(folder, *options)
    assert status == 0
    assert {path.name for path in folder.iterdir()} == {"record.json", "table.md"}
    printed = capsys.readouterr().out
    assert "no plots: import of matplotlib halted; None in sys.modules; draw them elsewhere" in printed
    assert f"`dynattn benchmark --redraw '{folder / 'record.json'}'`" in printed


@pytest.mark.slow
def test_compiled_candidates_in_a_process_that_pins_itself(tmp_path: Path) -> None:
    pinned = {*process.ALLOCATOR, process.THREADS}
    environment = {name: value for name, value in os.environ.items() if name not in pinned}
    command = [sys.executable, "-m", "dynattn.scripts.cli", "benchmark", "--output", str(tmp_path), "--rounds", "2"]
    command += ["--subjects", "attention,decode,relative", "--shapes", "2x8@200", "--implementations"]
    names = {"official-compiled", "chunked-compiled", "matmul-compiled", "rcmha-official-compiled"}
    command += ["sdpa", "mha-sdpa", *sorted(names)]
    subprocess.run(command, check=True, env=environment)
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["allocator"] == process.ALLOCATOR
    assert record["threads"] == 1
    rows = [row for case in record["cases"] for row in case["rows"]]
    assert not [row["failure"] for row in rows if "failure" in row]
    compiled = [row for row in rows if row["name"].endswith("-compiled")]
    assert {row["name"] for row in compiled} == names
    # Chunks of float32 on a CPU stay C code, which is compiled once for all processes.
    in_c = ("attention", "chunked-compiled")
    named = [(case["subject"], row) for case in record["cases"] for row in case["rows"] if row in compiled]
    slow_at_first = [row for subject, row in named if (subject, row["name"]) != in_c]
    assert len(slow_at_first) == len(compiled) - 2  # forward, and with backward
    assert all(row["first_seconds"] > 3 * row["timing"]["median"] for row in slow_at_first)
