"""The benchmark's command: its record, its refusals, its errors. The opponents' own tests are in the file beside."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dynattn.modeling.ops.dcmha import attention as dcmha
from dynattn.scripts import cli
from dynattn.scripts.benchmark import main as benchmark
from dynattn.scripts.benchmark.arguments import BenchmarkArguments
from dynattn.scripts.benchmark.harness import process
from dynattn.scripts.benchmark.harness.accuracy import judge
from dynattn.scripts.benchmark.harness.inputs import COMPOSED, make_inputs, truth_in
from dynattn.scripts.benchmark.harness.shapes import Shape, parse_shape, visible_pairs
from dynattn.scripts.benchmark.report import plots
from dynattn.scripts.benchmark.report.tables import format_record
from dynattn.scripts.benchmark.subjects import long_sequences as long
from dynattn.scripts.common.measuring import (
    LEAST_ROUNDS,
    MOST_CALLS,
    calls_of_a_sample,
    interleave,
    peak_memory,
    summarize,
)

CPU = torch.device("cpu")
PLOTS = {"time.png", "memory.png", "ratios.png", "roofline.png", "profile.png"}


@pytest.fixture(autouse=True)
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that the command has started anew."""
    for name, value in {**process.ALLOCATOR, process.THREADS: "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("DYNATTN_COMPILE", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)


def run(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Runs the job and returns its status and its record."""
    status = cli.main(["benchmark", "--output", str(folder), "--rounds", "2", *options])
    return status, json.loads((folder / "record.json").read_text())


def row_of(record: dict[str, Any], name: str, passes: str = "forward") -> dict[str, Any]:
    rows = [row for case in record["cases"] if case["passes"] == passes for row in case["rows"]]
    (found,) = (row for row in rows if row["name"] == name)
    return found


@pytest.fixture
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine can do need not be measured for one test."""
    monkeypatch.setattr(benchmark, "gemm_rate", lambda *_: 1e11)
    monkeypatch.setattr(benchmark, "copy_rate", lambda *_: 1e10)


@pytest.fixture
def register(known_machine: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[..., Any]], None]:
    """Puts an implementation into the op's registry for one test, which measures no machine and draws no plot."""
    monkeypatch.setattr(benchmark, "draw_plots", lambda *_: None)

    def put(name: str, attend: Callable[..., Any]) -> None:
        monkeypatch.setitem(dcmha.COMPOSING, name, attend)
        monkeypatch.setitem(dcmha.IMPLEMENTATIONS, name, attend)

    return put


def test_a_run_that_is_killed_leaves_the_cases_before(tmp_path: Path, register: Callable[..., None]) -> None:
    def attend(query: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        if query.shape[2] == 24:
            raise KeyboardInterrupt
        return dcmha.COMPOSING["eager"](query, *arguments, **keywords)

    register("brittle", attend)
    arguments = ("--quick", "--subjects", "attention", "--shapes", "2x8@16", "2x8@24")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, *arguments, "--implementations", "eager", "brittle", "sdpa")
    record = json.loads((tmp_path / "record.json").read_text())
    assert {case["shape"]["length"] for case in record["cases"]} == {16}


def test_a_tiny_run_of_every_subject_leaves_record_and_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "draw_plots", lambda *_: None)
    status, record = run(tmp_path, "--quick", "--shapes", "2x8@40", "--subjects", *benchmark.SUBJECTS)
    assert status == 0
    assert {case["subject"] for case in record["cases"]} == set(benchmark.SUBJECTS)
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
    assert table.count("| contestant") == len(record["cases"])
    assert "**attention, forward+backward: 2x8, 40 tokens, batch 1, float32**" in table
    shown = capsys.readouterr().out
    assert all(line in shown for line in table.splitlines() if line.startswith(("| ", "**")))


@pytest.mark.usefixtures("known_machine")
def test_a_record_draws_the_same_table_and_plots_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    with monkeypatch.context() as patch:
        patch.setattr(benchmark, "draw_plots", lambda *given: drawn.append(given))
        options = ["--subjects", "long,profile", "--window", "16", "--shapes", "2x8@24,2x8@40", "--quick"]
        _, record = run(tmp_path / "first", *options, "--implementations", "chunked,chunked-plain,sdpa,chunks")
    again = ["benchmark", "--redraw", str(tmp_path / "first" / "record.json"), "--output", str(tmp_path / "second")]
    assert cli.main(again) == 0
    for name in ("record.json", "table.md"):
        assert (tmp_path / "first" / name).read_text() == (tmp_path / "second" / name).read_text()
    assert (tmp_path / "second" / "table.md").read_text() == format_record(record)
    assert [(json.loads(json.dumps(given[0])), given[1]) for given in drawn] == [(record, tmp_path / "first")]
    plots_there = {path.name: path.read_bytes() for path in (tmp_path / "second").glob("*.png")}
    assert plots_there.keys() == PLOTS
    assert all(content.startswith(b"\x89PNG") for content in plots_there.values())


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
    status, record = run(tmp_path, *options)
    assert status == 1
    row = row_of(record, "skewed", passes)
    assert not row["verdict"]["correct"]
    assert row["verdict"]["excess"] > 100
    assert not {"ratio", "tokens_per_second", "flops_per_second"} & set(row)
    assert row_of(record, "eager", passes)["ratio"] > 0
    lines = format_record(record).split(passes + ":")[1].splitlines()
    cells = [cell.strip() for cell in next(line for line in lines if line.startswith("| skewed ")).split("|")[1:-1]]
    assert cells[5] == "wrong"
    assert "wrong: skewed: " in format_record(record)


def test_a_wrong_gradient_alone_leaves_the_forward_ratio(tmp_path: Path, register: Callable[..., None]) -> None:
    register("skewed", forgets_a_gradient)
    _, record = run(tmp_path, "--subjects", "attention", "--shapes", "2x8@40", "--implementations", "skewed,sdpa")
    assert row_of(record, "skewed")["ratio"] > 0
    assert row_of(record, "skewed", "forward+backward")["verdict"]["where"] == "grad key"


def test_a_wrong_plain_attention_is_no_baseline(tmp_path: Path, register: Callable[..., None]) -> None:
    register("empty", lambda query, key, value, **_: (torch.zeros_like(query).transpose(1, 2), None))
    options = ("--subjects", "attention", "--shapes", "2x8@128", "--implementations", "empty-plain,matmul,eager")
    status, record = run(tmp_path, *options)
    assert status == 1
    assert "ratio" not in row_of(record, "empty-plain")
    assert row_of(record, "matmul")["is_baseline"]


def test_what_is_wrong_after_the_first_calls_only_is_found(tmp_path: Path, register: Callable[..., None]) -> None:
    calls = []

    def tires(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> tuple[Tensor, None]:
        calls.append(None)
        return (drops_post if len(calls) > 8 else dcmha.dcmha_eager)(query, key, value, **arguments)[0], None

    register("tires", tires)
    options = ("--subjects", "attention", "--shapes", "2x8@40", "--implementations", "tires,sdpa")
    status, record = run(tmp_path, *options)
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
    found, record = run(tmp_path, *options)
    assert found == status
    assert row_of(record, "refuses")["failure"] == f"{error.__name__}: head_dim 8 is not supported"
    assert "not measured: refuses: " in (tmp_path / "table.md").read_text()


def test_a_result_of_another_shape_is_wrong_although_it_broadcasts() -> None:
    truth = {"output": torch.ones(2, 3, dtype=torch.float64)}
    reference = {"output": torch.ones(2, 3)}
    assert judge(reference, truth, reference).correct
    assert not judge({"output": torch.ones(3)}, truth, reference).correct
    assert not judge({}, truth, reference).correct


def test_a_gradient_that_is_zero_but_for_rounding_is_judged_by_the_references_own_rounding() -> None:
    truth = {"output": torch.ones(4, dtype=torch.float64), "grad bias": torch.full((4,), 1e-17, dtype=torch.float64)}
    reference = {"output": torch.ones(4), "grad bias": torch.full((4,), 1e-7)}
    assert judge({"output": torch.ones(4), "grad bias": torch.full((4,), -2e-7)}, truth, reference).correct
    assert not judge({"output": torch.ones(4), "grad bias": torch.full((4,), 1e-5)}, truth, reference).correct


def test_who_is_over_the_budget_is_left_out_here_and_with_more_tokens(
    tmp_path: Path, register: Callable[..., None]
) -> None:
    lengths = []

    def dawdles(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> tuple[Tensor, None]:
        lengths.append(query.shape[2])
        time.sleep(0.3 if query.shape[2] > 40 else 0)
        return dcmha.dcmha_eager(query, key, value, **arguments)[0], None

    register("dawdles", dawdles)
    options = ("--subjects", "attention", "--shapes", "2x8@30,2x8@60,2x8@90", "--budget", "0.2")
    status, record = run(tmp_path, *options, "--implementations", "dawdles,sdpa")
    assert status == 0
    shown = [row for case in record["cases"] for row in case["rows"] if row["name"] == "dawdles"]
    assert ["timing" in row for row in shown] == [True, True, False, False, False, False]
    assert shown[2]["failure"].startswith("over the budget: its first call took 0.3")
    assert shown[4]["failure"] == "over the budget with fewer tokens already"
    assert lengths.count(60) == 2
    assert 90 not in lengths
    assert "not measured: dawdles: over the budget: " in (tmp_path / "table.md").read_text()


def test_samples_end_where_the_budget_does() -> None:
    samples = interleave({"slow": lambda: time.sleep(0.02) or 0.0, "fast": lambda: 0.0}, rounds=8, budget=0.01)
    assert {name: len(taken) for name, taken in samples.items()} == {"slow": LEAST_ROUNDS, "fast": 8}


def test_cases_after_the_end_are_left_out_by_name(tmp_path: Path, register: Callable[..., None]) -> None:
    arguments = BenchmarkArguments(subjects=["attention"], shapes=["2x8@40"], implementations=["sdpa"], rounds=1)
    assert benchmark.run([], arguments, tmp_path, end=time.monotonic() - 1)
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["cases"] == []
    assert record["cases_left_out"][0] == "attention, forward: 2x8, 40 tokens, batch 1, float32"
    assert "No time was left for: attention, forward: 2x8" in (tmp_path / "table.md").read_text()


@pytest.mark.usefixtures("known_machine")
def test_a_machine_without_matplotlib_measures_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, plots.__name__)
    status, _ = run(tmp_path, "--subjects", "decode", "--shapes", "2x8@16", "--implementations", "sdpa,chunked")
    assert status == 0
    assert {path.name for path in tmp_path.iterdir()} == {"record.json", "table.md"}
    assert "no plots: import of matplotlib halted; None in sys.modules; draw them elsewhere" in capsys.readouterr().out


def test_long_sequences_are_judged_by_some_of_their_queries(tmp_path: Path, register: Callable[..., None]) -> None:
    def errs_at_the_end(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> tuple[Tensor, None]:
        output, _ = dcmha.dcmha_eager(query, key, value, **arguments)
        return torch.cat([output[:, :-1], output[:, -1:] * 1.001], dim=1), None

    register("errs", errs_at_the_end)
    options = ("--subjects", "long", "--shapes", "2x8@300", "--implementations", "errs,chunked,sdpa,official")
    status, record = run(tmp_path, *options)
    assert status == 1
    assert [case["window"] for case in record["cases"]] == [256, 256, None, None]
    for case in record["cases"]:
        rows = {row["name"]: row for row in case["rows"]}
        assert rows["chunked"]["verdict"]["correct"] and not rows["errs"]["verdict"]["correct"]
        assert ("failure" in rows["sdpa"]) == (case["window"] is not None)
        assert ("failure" in rows["official"]) == (case["passes"] == "forward+backward")


def test_the_truth_of_some_queries_has_the_gradients_of_all_that_they_depend_on() -> None:
    made = make_inputs(2, 8, 60, 60, batch=2, dtype=torch.float64, device=CPU, seed=1, window=20)[COMPOSED]
    chunks = [slice(10, 16), slice(50, 60)]
    checked = torch.cat([torch.arange(one.start, one.stop) for one in chunks])
    inputs = long.with_cotangent_at(made, checked)
    expected = dict(truth_in(inputs, torch.float64, backward=True))
    expected["output"] = expected["output"][:, checked]
    torch.testing.assert_close(dict(truth_in(inputs, torch.float64, backward=True, chunks=chunks)), expected)


def test_contestants_take_turns() -> None:
    order: list[str] = []

    def sampler(name: str) -> Callable[[], float]:
        def take() -> float:
            order.append(name)
            return float(len(order))

        return take

    samples = interleave({name: sampler(name) for name in "abc"}, rounds=3)
    assert "".join(order) == "abcabcabc"
    assert samples == {"a": [1.0, 4.0, 7.0], "b": [2.0, 5.0, 8.0], "c": [3.0, 6.0, 9.0]}


def test_one_slow_call_does_not_shrink_the_samples() -> None:
    calls = []

    def call() -> None:
        calls.append(None)
        time.sleep(0.1 if len(calls) == 1 else 0.001)

    assert calls_of_a_sample(call, CPU, seconds=0.02) > 5
    assert calls_of_a_sample(lambda: None, CPU, seconds=1.0) == MOST_CALLS


def test_summaries() -> None:
    timing = summarize([5.0, 1.0, 3.0, 2.0, 4.0], calls=7)
    assert (timing.n, timing.calls, timing.median, timing.minimum, timing.spread) == (5, 7, 3.0, 1.0, 2.0)
    assert summarize([2.0], calls=1).spread == 0


def test_peak_memory_counts_temporaries_and_results_but_not_what_was_there() -> None:
    there = torch.ones(2**18)  # 1 MiB

    def call() -> Tensor:
        temporary = there + 1
        larger = torch.cat([temporary, temporary])
        del temporary
        return larger[:1].clone()

    assert peak_memory(call, CPU) == pytest.approx(3 * 2**20, rel=0.01)


@pytest.mark.parametrize(("window", "memory"), [(None, 0), (3, 0), (None, 4), (3, 4), (100, 2)])
def test_visible_pairs(window: int | None, memory: int) -> None:
    counted = sum(
        1
        for query in range(memory, memory + 9)
        for key in range(memory + 9)
        if key <= query and (window is None or query - key < window)
    )
    assert visible_pairs(9, window, memory) == counted


def test_shapes() -> None:
    assert parse_shape("16x64@2048") == Shape(16, 64, 2048)
    assert str(parse_shape("8x16@2+32")) == "8x16@2+32"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--subjects", "speed"],
            "unknown subject 'speed'; choose from attention, block, training, prefill, decode, step, relative, long, ",
        ),
        (["--implementations", "magic"], "unknown implementation 'magic'; choose from eager, "),
        (["--shapes", "16x64"], "shape '16x64' is not HEADSxWIDTH@LENGTH"),
        (["--shapes", "16x0@64"], "shape '16x0@64' is not HEADSxWIDTH@LENGTH with positive numbers"),
        (["--shapes", "2x8@8+8"], r"a shape with \+MEMORY is for --subjects relative alone"),
        (["--window", "4"], "--window is not for the subject relative; name other --subjects"),
        (["--device", "tpu"], "device 'tpu' cannot be measured; choose cpu or cuda"),
        (["--device", "cuda:77"], r"device 'cuda:77' is not there \(\d+ CUDA devices found\); use cpu"),
        (["--preset", "gpu"], "--preset gpu needs a CUDA device, and none was found"),
        (["--budget", "0"], "budget must be more than 0 seconds, not 0"),
        (["--threads", "0"], "threads must be at least 1, not 0"),
        (["--rounds", "0"], "rounds must be at least 1, not 0"),
        (["--redraw", "nowhere.json"], "cannot read the record nowhere.json"),
        (["--redraw", "pyproject.toml"], "cannot read the record pyproject.toml"),
    ],
)
def test_mistakes_are_told(
    tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["benchmark", "--output", str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("dynattn benchmark: error: ")
    assert len(error.splitlines()) == 1
    with pytest.raises(benchmark.UserError, match=message):
        benchmark.main(["--output", str(tmp_path / "out"), *options])
    assert not (tmp_path / "out").exists()


def test_a_record_is_not_overwritten_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "record.json").write_text("{}")
    assert cli.main(["benchmark", "--output", str(tmp_path)]) == 2
    assert "record.json exists; choose another --output or pass --overwrite" in capsys.readouterr().err
    assert cli.main(["benchmark", "--redraw", str(tmp_path / "record.json"), "--output", str(tmp_path / "o")]) == 2
    assert "is not the record.json of a benchmark" in capsys.readouterr().err


def test_the_process_starts_anew_only_where_settings_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda _, command, environment: started.append((command, environment)))
    process.pin_process(["--quick"], threads=1)
    assert not started
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "12345")
    process.pin_process(["--quick"], threads=None)
    command, environment = started.pop()
    assert command == [sys.executable, "-m", "dynattn.scripts.cli", "benchmark", "--quick"]
    assert environment["MALLOC_TRIM_THRESHOLD_"] == process.ALLOCATOR["MALLOC_TRIM_THRESHOLD_"]
    assert environment["MALLOC_MMAP_THRESHOLD_"] == "12345"
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "8")
    process.pin_process([], threads=2)
    assert started.pop()[1][process.THREADS] == "2"
    assert not started


@pytest.mark.slow
def test_compiled_contestants_in_a_process_that_pins_itself(tmp_path: Path) -> None:
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
