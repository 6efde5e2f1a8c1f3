"""What a decoding step is given: the factors of a cache, as models keep them."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from cases.benchmark import inputs_of
from torch.overrides import TorchFunctionMode

from dynattn.modeling.ops.dcmha.triton.decode import _side
from dynattn.scripts.benchmark.arguments import BenchmarkArguments
from dynattn.scripts.benchmark.harness.inputs import COMPOSED, PLAIN
from dynattn.scripts.benchmark.harness.settings import read_settings
from dynattn.scripts.benchmark.harness.shapes import parse_shape
from dynattn.scripts.benchmark.subjects.attention import OpProblem, in_graph, make_candidate
from dynattn.scripts.benchmark.subjects.decode import attend_step, candidates, cases, packed


def test_factors_are_views_that_kernels_read_in_place() -> None:
    given = inputs_of(COMPOSED, 1, 37)
    made = packed(given)
    for name, leaf in given.leaves().items():
        assert torch.equal(made.leaves()[name], leaf)
    for stage in (made.pre, made.post):
        assert stage is not None
        for side in ("query", "key"):
            down, up, gate = stage.side(side)
            assert down is not None and gate is not None
            read = _side(down, up, gate).down
            assert read is not None and read.data_ptr() == down.data_ptr()


def test_the_plain_baseline_with_padding_is_a_single_function_of_pytorch() -> None:
    class Calls(TorchFunctionMode):
        names: set[str] = set()

        def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            self.names.add(function.__name__)
            return function(*arguments, **(options or {}))

    _, padded = cases(parse_shape("4x8@32"), read_settings(BenchmarkArguments()))
    (sdpa,) = (one for one in candidates(torch.device("cpu")) if one.name == "sdpa")
    call = sdpa.prepare(padded.problem)
    with Calls() as calls:
        output = call()["output"]
    assert calls.names - {"__get__", "_set_grad_enabled"} == {"scaled_dot_product_attention", "transpose"}
    torch.testing.assert_close(output, padded.reference(PLAIN, torch.float32)["output"])


def test_hidden_keys_are_no_work() -> None:
    settings = read_settings(BenchmarkArguments(batch_size=2))
    _, padded = cases(parse_shape("4x8@32"), settings)
    short, _ = cases(parse_shape("4x8@24"), settings)
    for function in (COMPOSED, PLAIN):
        assert padded.flops(function) == short.flops(function)
        assert padded.traffic is not None and short.traffic is not None
        assert padded.traffic(function) == short.traffic(function)


def test_a_graph_is_captured_on_its_device_after_a_first_call_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        events.append(f"on {device}")
        yield
        events.append("as before")

    class Graph:
        def replay(self) -> None:
            events.append("replay")

    def attend(inputs: Any) -> torch.Tensor:
        events.append("call")
        return attend_step(inputs, implementation="eager")

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("synchronize"))
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", partial(object))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    inputs = inputs_of(COMPOSED, 1, 9)
    candidate = in_graph(make_candidate("eager", "ours", COMPOSED, attend))
    call = candidate.prepare(OpProblem({COMPOSED: inputs}, backward=False))
    assert events == ["on cpu", "synchronize", "call", "synchronize", "call", "as before"]
    assert torch.equal(call()["output"], attend_step(inputs, implementation="eager"))
    assert events[-1] == "replay"
    named = {one.name: one.role for one in candidates(torch.device("cuda"))}
    assert (named["triton-graph"], named["sdpa-graph"]) == ("ours", "plain")
    assert "triton-graph" not in {one.name for one in candidates(torch.device("cpu"))}
