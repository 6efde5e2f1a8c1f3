"""The official style of relative attention: the official results, and the same function as ours."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dynattn.scripts.benchmark.arguments import BenchmarkArguments
from dynattn.scripts.benchmark.baselines.relative import OfficialRelativeAttention, as_official, from_official
from dynattn.scripts.benchmark.harness.settings import read_settings
from dynattn.scripts.benchmark.harness.shapes import Shape
from dynattn.scripts.benchmark.subjects import relative

GOLDEN = Path(__file__).parents[3] / "golden"

GOLDEN_LAYERS = sorted(path.name for path in GOLDEN.glob("*_attn_q*"))


@pytest.mark.parametrize("case", GOLDEN_LAYERS)
def test_the_official_style_layer_gives_the_official_results(case: str) -> None:
    meta = json.loads((GOLDEN / case / "meta.json").read_text())
    tensors = load_file(GOLDEN / case / "tensors.safetensors")
    layer = OfficialRelativeAttention(meta["kind"], meta["d_model"], meta["heads"], meta["P"]).double()
    layer.load_state_dict({name.removeprefix("sd."): one for name, one in tensors.items() if name.startswith("sd.")})
    query, rows = (tensors[name].requires_grad_() for name in ("query", "key_value"))
    output = layer(query, rows)
    torch.testing.assert_close(output, tensors["y"])
    output.backward(tensors["grad_y"])
    leaves = {**dict(layer.named_parameters()), "query": query, "key_value": rows}
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad, tensors[f"grad.{name}"], atol=1e-10, rtol=1e-8, msg=name)


def test_golden_layers_of_every_type_are_there() -> None:
    assert {name.partition("_")[0] for name in GOLDEN_LAYERS} == set(relative.ATTENTION_TYPES)


@pytest.mark.parametrize("kind", relative.ATTENTION_TYPES)
@pytest.mark.parametrize("memory", [0, 9])
def test_both_styles_of_a_layer_are_the_same_function(kind: str, memory: int) -> None:
    settings = replace(read_settings(BenchmarkArguments(batch_size=2)), dtype=torch.float64)
    problem = relative.make_problem(Shape(4, 8, 12, memory), settings, backward=True)
    ours = relative.prepare_ours(problem, kind=kind, implementation="eager")()
    official = relative.prepare_official(problem, kind=kind, compiles=False)()
    torch.testing.assert_close(dict(official), dict(ours), atol=1e-10, rtol=1e-8)
    back = from_official(
        as_official(problem.weights[kind], relative.DISTANCES), problem.weights[kind], relative.DISTANCES
    )
    torch.testing.assert_close(back, problem.weights[kind], atol=0, rtol=0)
