"""The benchmark's opponents compute what they are compared with, and its operation counts are those of PyTorch."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dynattn import DCFormerConfig, DCFormerForCausalLM
from dynattn.scripts.benchmark.baselines.dcmha import (
    attend_in_chunks,
    attend_whole,
    decode_with_matrices,
    key_matrix_cache,
    mixing_matrices,
)
from dynattn.scripts.benchmark.baselines.relative import OfficialRelativeAttention, as_official, from_official
from dynattn.scripts.benchmark.harness.inputs import (
    COMPOSED,
    PLAIN,
    STATIC,
    Inputs,
    attend_by_definition,
    evaluate,
    make_inputs,
    requiring_grad,
    truth_in,
)
from dynattn.scripts.benchmark.harness.settings import Settings
from dynattn.scripts.benchmark.harness.shapes import Shape, visible_pairs
from dynattn.scripts.benchmark.subjects import models, relative
from dynattn.scripts.benchmark.subjects.op_flops import attention_flops, composition_flops, decode_flops
from dynattn.scripts.common.flops import projection_flops

CPU = torch.device("cpu")
GOLDEN = Path(__file__).parents[2] / "golden"
GOLDEN_LAYERS = sorted(path.name for path in GOLDEN.glob("*_attn_q*"))


def inputs_of(function: str, queries: int, keys: int, window: int | None = None) -> Inputs:
    made = make_inputs(4, 8, queries, keys, batch=2, dtype=torch.float64, device=CPU, seed=3, window=window)
    return made[function]


@pytest.mark.parametrize("window", [None, 5, 150])
@pytest.mark.parametrize(
    ("attend", "function"),
    [(attend_in_chunks, COMPOSED), (attend_in_chunks, STATIC), (attend_in_chunks, PLAIN), (attend_whole, PLAIN)],
)
def test_opponents_equal_the_reference_op(
    attend: Callable[[Inputs], Tensor], function: str, window: int | None
) -> None:
    inputs = requiring_grad(inputs_of(function, 300, 300, window))
    expected = evaluate(attend_by_definition, inputs, backward=True)
    assert len(expected) == {PLAIN: 4, STATIC: 6, COMPOSED: 16}[function]
    torch.testing.assert_close(dict(evaluate(attend, inputs, backward=True)), dict(expected), atol=1e-11, rtol=1e-10)


@pytest.mark.parametrize("window", [None, 40])
def test_the_truth_in_chunks_is_the_truth(window: int | None) -> None:
    inputs = inputs_of(COMPOSED, 300, 300, window)
    expected = evaluate(attend_by_definition, requiring_grad(inputs), backward=True)
    found = truth_in(inputs, torch.float64, backward=True)
    torch.testing.assert_close(dict(found), dict(expected), atol=1e-11, rtol=1e-10)
    assert truth_in(inputs, torch.float32, backward=True)["grad query"].dtype == torch.float32


def test_a_cache_of_matrices_decodes_what_the_reference_op_gives() -> None:
    inputs = inputs_of(COMPOSED, 1, 50)
    assert inputs.pre is not None and inputs.post is not None
    found = decode_with_matrices(
        inputs.query,
        inputs.key,
        inputs.value,
        mixing_matrices("query", inputs.pre, inputs.post),
        key_matrix_cache(inputs),
    )
    torch.testing.assert_close(found, attend_by_definition(inputs))
    torch.testing.assert_close(truth_in(inputs, torch.float64, backward=False)["output"], attend_by_definition(inputs))
    plain = replace(inputs, pre=None, post=None)
    torch.testing.assert_close(attend_whole(plain), attend_by_definition(plain))


def test_composition_of_the_inputs_matters() -> None:
    """An opponent that dropped a term would otherwise pass."""
    inputs = inputs_of(COMPOSED, 64, 64)
    assert inputs.pre is not None and inputs.post is not None
    whole = attend_by_definition(inputs)
    for stage, composition in (("pre", inputs.pre), ("post", inputs.post)):
        for term in (("query_down", "query_up"), ("key_down", "key_up"), ("query_gate",), ("key_gate",)):
            without = replace(inputs, **{stage: replace(composition, **dict.fromkeys(term))})
            assert (attend_by_definition(without) - whole).norm() > 0.02 * whole.norm()


@pytest.mark.parametrize("case", GOLDEN_LAYERS)
def test_the_official_style_layer_gives_the_official_numbers(case: str) -> None:
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
    assert {name.partition("_")[0] for name in GOLDEN_LAYERS} == set(relative.TYPES)


@pytest.mark.parametrize("kind", relative.TYPES)
@pytest.mark.parametrize("memory", [0, 9])
def test_both_styles_of_a_layer_are_the_same_function(kind: str, memory: int) -> None:
    settings = Settings(torch.float64, CPU, None, 2, 0, 1, 0.01, False, ())
    problem = relative.make_problem(Shape(4, 8, 12, memory), settings, backward=True)
    ours = relative.prepare_ours(problem, kind=kind, implementation="eager")()
    official = relative.prepare_official(problem, kind=kind, compiles=False)()
    torch.testing.assert_close(dict(official), dict(ours), atol=1e-10, rtol=1e-8)
    back = from_official(
        as_official(problem.weights[kind], relative.POSITIONS), problem.weights[kind], relative.POSITIONS
    )
    torch.testing.assert_close(back, problem.weights[kind], atol=0, rtol=0)


def counted(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call()
    return counter.get_total_flops()


def test_operations_of_a_decoded_token_are_those_that_pytorch_counts() -> None:
    plain = inputs_of(PLAIN, 1, 50)
    assert counted(lambda: attend_whole(plain)) == 2 * decode_flops(Shape(4, 8, 50), 50, PLAIN)  # batch 2


@pytest.mark.parametrize("function", [PLAIN, COMPOSED])
def test_operations_of_a_model_are_those_that_pytorch_counts(function: str) -> None:
    layers, heads, width, length = 2, 4, 8, 24
    composes = function == COMPOSED
    config = DCFormerConfig(
        vocab_size=64,
        hidden_size=heads * width,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        sliding_window=None,
        compose_pre=composes,
        compose_post=composes,
        attn_implementation="eager",
    )
    model = DCFormerForCausalLM(config).eval()
    gates = 4 * 2 if composes else 0  # elementwise, which PyTorch does not count
    of_a_pair = 4 * width + 2 * composition_flops(function, heads) - gates
    # The reference op computes masked pairs, too.
    expected = layers * heads * length**2 * of_a_pair + length * projection_flops(model)
    assert counted(lambda: model(torch.ones(1, length, dtype=torch.long), use_cache=False)) == expected
    visible = attention_flops(Shape(heads, width, length), None, function)
    assert visible == heads * length * (length + 1) // 2 * (of_a_pair + gates)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("step", "logits"), [(models.prefill_step, 1), (models.training_step, 24)])
def test_operations_of_a_step_are_those_that_pytorch_counts(step: models.Step, logits: int, window: int | None) -> None:
    batch, layers, heads, width, length = 2, 3, 4, 8, 24
    settings = Settings(torch.float32, CPU, window, batch, 0, 1, 0.01, False, (), vocabulary=64)
    problem = models.make_problem(Shape(heads, width, length), settings, step, layers)
    with FlopCounterMode(display=False) as counter:
        step(problem.model(PLAIN, "eager"), problem.tokens)()
    # The reference op computes hidden pairs, too.
    hidden = batch * layers * heads * (length**2 - visible_pairs(length, window)) * 4 * width
    passes = 3 if step is models.training_step else 1
    assert passes * (problem.flops(PLAIN, logits) + hidden) == counter.get_total_flops()
