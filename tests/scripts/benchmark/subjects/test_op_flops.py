"""The FLOPs of the subjects are those that PyTorch counts."""

from collections.abc import Callable

import pytest
import torch
from cases.benchmark import inputs_of
from torch.utils.flop_counter import FlopCounterMode

from dynattn import DCFormerConfig, DCFormerForCausalLM
from dynattn.scripts.benchmark.arguments import BenchmarkArguments
from dynattn.scripts.benchmark.baselines.dcmha import attend_whole
from dynattn.scripts.benchmark.harness.inputs import COMPOSED, PLAIN
from dynattn.scripts.benchmark.harness.settings import read_settings
from dynattn.scripts.benchmark.harness.shapes import Shape, visible_pairs
from dynattn.scripts.benchmark.subjects import attention, generation_step, models
from dynattn.scripts.benchmark.subjects.op_flops import attention_flops, composition_flops
from dynattn.scripts.common.flops import projection_flops


def counted(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call()
    return counter.get_total_flops()


def test_operations_of_a_decoded_token_are_those_that_pytorch_counts() -> None:
    plain = inputs_of(PLAIN, 1, 50)
    assert counted(lambda: attend_whole(plain)) == 2 * attention_flops(Shape(4, 8, 50), 50, PLAIN)  # batch 2


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
    settings = read_settings(BenchmarkArguments())
    for is_causal, pairs in ((True, length * (length + 1) // 2), (False, length**2)):
        case = next(attention.cases(Shape(heads, width, length), settings, is_causal=is_causal))
        assert case.flops(function) == heads * pairs * (of_a_pair + gates)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("step", "logits"), [(models.prefill_step, 1), (models.training_step, 24)])
def test_operations_of_a_step_are_those_that_pytorch_counts(step: models.Step, logits: int, window: int | None) -> None:
    batch, layers, heads, width, length = 2, 3, 4, 8, 24
    settings = read_settings(BenchmarkArguments(window=window, batch_size=batch, vocabulary=64))
    problem = models.make_problem(Shape(heads, width, length), settings, step, layers)
    with FlopCounterMode(display=False) as counter:
        step(problem.model(PLAIN, "eager"), problem.tokens)()
    # The reference op computes hidden pairs, too.
    hidden = batch * layers * heads * (length**2 - visible_pairs(length, window)) * 4 * width
    passes = 3 if step is models.training_step else 1
    assert passes * (problem.flops(PLAIN, torch.arange(length), logits) + hidden) == counter.get_total_flops()


def test_operations_of_a_generated_token_are_those_that_pytorch_counts() -> None:
    (case,) = generation_step.cases(Shape(4, 8, 24), read_settings(BenchmarkArguments(batch_size=2, vocabulary=64)))
    call = generation_step.token_step(case.problem.model(PLAIN, "eager"), case.problem.tokens)
    with FlopCounterMode(display=False) as counter:
        call()
    assert case.flops(PLAIN) == counter.get_total_flops()
    assert case.tokens == 2
