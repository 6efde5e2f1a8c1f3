"""Profiles: their parts compute what they are called, and calls under the clock give the same results."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.benchmark import inputs_of, run_benchmark
from torch import Tensor

from dynattn.modeling.ops.dcmha.chunked import chunk, tiling
from dynattn.scripts.benchmark import main as benchmark
from dynattn.scripts.benchmark.harness.inputs import COMPOSED, PLAIN, OpInputs, evaluate, requiring_grad
from dynattn.scripts.benchmark.harness.shapes import Shape, visible_pairs
from dynattn.scripts.benchmark.subjects import profile
from dynattn.scripts.benchmark.subjects.attention import compiling_as
from dynattn.scripts.benchmark.subjects.op_flops import attention_flops
from dynattn.scripts.benchmark.subjects.parts import BACKWARD_PARTS, FORWARD_PARTS, REST, UNCLOCKED, WHOLE
from dynattn.scripts.benchmark.subjects.profile import PartClock, attend_chunked
from dynattn.scripts.benchmark.subjects.selection import NAMED
from dynattn.scripts.common.errors import UserError

HEADS, WIDTH, LENGTH = 2, 8, 100

FORWARD, BACKWARD = list(FORWARD_PARTS.values()), list(BACKWARD_PARTS.values())


def op_inputs(function: str, dtype: torch.dtype = torch.float32) -> OpInputs:
    return inputs_of(function, LENGTH, LENGTH, heads=HEADS, width=WIDTH, dtype=dtype)


def clocked(inputs: OpInputs, clock: PartClock, *, backward: bool = True) -> dict[str, Tensor]:
    attend = clock.in_phases(attend_chunked)
    with clock.installed():
        return dict(evaluate(attend, requiring_grad(inputs) if backward else inputs, backward=backward))


@pytest.mark.usefixtures("known_machine", "no_plots")
def test_the_parts_of_a_call_and_what_is_left_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, record = run_benchmark(tmp_path, "--subjects", "profile", "--shapes", "2x8@100", "--batch_size", "2")
    assert status == 0
    table = (tmp_path / "table.md").read_text()
    for case in record["cases"]:
        rows = {row["name"]: row for row in case["rows"]}
        assert set(rows) == {"chunked-stepwise", "sdpa"}
        assert all(row["verdict"]["correct"] for row in rows.values())
        assert "profile" not in rows["sdpa"]
        expected = FORWARD + (BACKWARD if case["passes"] == "forward+backward" else [])
        parts = rows["chunked-stepwise"]["profile"]
        assert [part["name"] for part in parts] == [*expected, REST, WHOLE, UNCLOCKED]
        assert_parts_fill_the_call(parts)
        assert "| part of chunked-stepwise " in table
    assert table.count("| value gradient ") == 1
    assert "at the rate of a large square product (" in table
    shown = capsys.readouterr().out
    assert all(line in shown for line in table.splitlines() if line.startswith("| "))


def assert_parts_fill_the_call(parts: list[dict[str, Any]]) -> None:
    samples = {part["name"]: part["samples"] for part in parts}
    unclocked, whole = samples.pop(UNCLOCKED), samples.pop(WHOLE)
    assert len(unclocked) == len(whole) == 2
    assert min(map(min, samples.values())) > 0
    assert [sum(turn) for turn in zip(*samples.values(), strict=True)] == pytest.approx(whole)
    assert sum(map(sum, (one for name, one in samples.items() if name != REST))) < sum(whole)
    for part in parts:
        assert (part["floor_seconds"] is None) == (part["name"] in (REST, UNCLOCKED))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("backward", [False, True])
def test_calls_under_the_clock_give_the_same_results_and_count_every_part_alike(
    dtype: torch.dtype, backward: bool
) -> None:
    """In float64 the last chunk is shorter than the others and composed by another composer than they are."""
    inputs, clock = op_inputs(COMPOSED, dtype), PartClock()
    attend = compiling_as("0")(partial(evaluate, attend_chunked, backward=backward))
    expected = attend(requiring_grad(inputs) if backward else inputs)
    torch.testing.assert_close(clocked(inputs, clock, backward=backward), dict(expected), atol=0, rtol=0)
    assert set(clock.calls) == set(FORWARD + BACKWARD if backward else FORWARD)
    assert len(set(clock.calls.values())) == 1
    assert clock.softmaxes == 0


@pytest.mark.parametrize(("stage", "other"), [("pre", "post"), ("post", "pre")])
def test_composition_belongs_to_its_stage(stage: str, other: str) -> None:
    inputs, clock = op_inputs(COMPOSED), PartClock()
    clocked(replace(inputs, **{other: None}), clock)
    found = {name for name in clock.seconds if "composition" in name}
    assert found == {f"{stage}-composition{end}" for end in ("", " again", " backward")}


def test_matrix_products_are_what_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores and the gradient of the probabilities sum over the width of a head, the others over keys or queries."""
    made: list[tuple[str, int, int]] = []

    class Spy(PartClock):
        def add(self, name: str, nanoseconds: int) -> None:
            before = dict(self.calls)
            super().add(name, nanoseconds)
            (part,) = (part for part, count in self.calls.items() if count != before.get(part, 0))
            if name in profile.MATMULS:
                made.append((part, *sizes.pop()))

    sizes: list[tuple[int, int]] = []
    for name in profile.MATMULS:
        monkeypatch.setattr(chunk, name, spied(getattr(chunk, name), sizes))
    clocked(op_inputs(PLAIN), Spy())
    over_width = {"scores", "scores again", "probability gradient"}
    assert {part for part, summed, _ in made if summed == WIDTH} == over_width
    assert {part for part, _, last in made if last == WIDTH} == {part for part, *_ in made} - over_width


def spied(function: Callable[..., None], sizes: list[tuple[int, int]]) -> Callable[..., None]:
    """Keeps what is summed over, and the last size of the result."""

    def run(*arguments: Any, out: Tensor | None = None) -> None:
        left, right = (arguments if out is not None else arguments[1:])[:2]
        sizes.append((left.shape[-1], right.shape[-1]))
        function(*arguments, **({} if out is None else {"out": out}))

    return run


def test_the_op_is_its_own_again_after_all_went_well_and_after_it_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def functions() -> list[Any]:
        loop = [getattr(tiling, name) for name in ("choose_composer", "STEPWISE")]
        return [*loop, *(getattr(chunk, name) for name in profile.CHUNK_FUNCTIONS)]

    before = functions()
    with PartClock().installed():
        assert not any(one is other for one, other in zip(functions(), before, strict=True))
    assert all(one is other for one, other in zip(functions(), before, strict=True))
    clock = PartClock()
    monkeypatch.delitem(FORWARD_PARTS, ("softmax", 0))
    with pytest.raises(RuntimeError, match="a chunk has no part for softmax after 0 softmax steps"):
        clocked(op_inputs(PLAIN), clock)
    assert all(one is other for one, other in zip(functions(), before, strict=True))


def test_floors_by_hand() -> None:
    floors = profile.Floors(pairs=100, width=8, composition=20, call=5200.0, matmul_rate=1000.0, pass_rate=40.0)
    assert floors.seconds("query gradient") == 100 * 16 / 1000
    assert floors.seconds("softmax backward") == floors.seconds("pre-composition") == 100 / 40
    assert floors.seconds("pre-composition backward") == 100 * 40 / 1000
    assert floors.seconds(WHOLE) == 5.2
    assert floors.seconds(REST) is None


def test_floors_of_the_forward_parts_sum_to_that_of_the_call_where_passes_are_free() -> None:
    shape, pairs = Shape(4, 8, 50), visible_pairs(50, 20)
    flops = attention_flops(shape, pairs, COMPOSED)
    composition = profile.composition_flops(COMPOSED, shape.heads)
    floors = profile.Floors(4 * pairs, 8, composition, flops, 1e9, float("inf"))
    assert sum(floors.seconds(part) or 0.0 for part in FORWARD) == pytest.approx(flops / 1e9)


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown implementation 'eager'; choose from chunked-stepwise, sdpa"):
        benchmark.main(["--output", str(tmp_path), "--subjects", "profile", "--implementations", "eager"])
    with pytest.raises(UserError, match="the processor's clock, not that of cuda; use --device cpu"):
        profile.candidates(torch.device("cuda"))
    assert profile.PROFILE in NAMED
