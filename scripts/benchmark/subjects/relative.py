"""Whole attention layers of the RCMHA family with segment memory, from the projections to the output."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dynattn import RCMHAConfig
from dynattn.configuration.relative_config import ATTENTION_TYPES
from dynattn.modeling.layers.relative_attention import RCMHAAttention
from dynattn.modeling.layers.segment import Segment
from dynattn.modeling.ops.relative.attention import RELATIVE_IMPLEMENTATIONS

from ..baselines.relative import OfficialRelativeAttention, as_official, from_official
from ..harness.accuracy import Results, with_gradients
from ..harness.interface import COMPILED, Candidate, Case, Role, Subject, passes_of
from ..harness.settings import BenchmarkSettings
from ..harness.shapes import Shape
from .op_flops import relative_flops

# Distances from a query to a key that the position tables of both styles know.
DISTANCES = 2048


class LayerProblem(NamedTuple):
    """Memory and segment (`hidden_states`), a gradient of the output (`cotangent`), and the weights of each type."""

    hidden_states: Tensor  # [B, M + T, E]
    cotangent: Tensor  # [B, T, E]
    configs: dict[str, RCMHAConfig]
    weights: dict[str, dict[str, Tensor]]
    backward: bool


def candidates(device: torch.device) -> list[Candidate]:
    """Each attention type in each of our implementations, and in the official style, eager and compiled."""
    found = []
    for kind in ATTENTION_TYPES:
        role: Role = "plain" if kind == "mha" else "ours"
        for name in RELATIVE_IMPLEMENTATIONS:
            found += [Candidate(f"{kind}-{name}", role, kind, partial(prepare_ours, kind=kind, implementation=name))]
        role = "plain" if kind == "mha" else "other"
        for suffix in ("", COMPILED):
            prepare = partial(prepare_official, kind=kind, compiles=bool(suffix))
            found += [Candidate(f"{kind}-official{suffix}", role, kind, prepare)]
    return found


def prepare_ours(
    problem: LayerProblem, *, kind: str, implementation: str, dtype: torch.dtype | None = None
) -> Callable[[], Results]:
    """Our layer, called as models call it."""
    dtype = dtype or problem.hidden_states.dtype
    config = copy.deepcopy(problem.configs[kind])
    config._attn_implementation = implementation
    with torch.device(problem.hidden_states.device):
        layer = RCMHAAttention(config, layer_idx=0)
    layer.load_state_dict(problem.weights[kind])
    layer.to(dtype).requires_grad_(problem.backward)
    rows = problem.hidden_states.detach().to(dtype).requires_grad_(problem.backward)
    segment = Segment(problem.cotangent.shape[1])

    def attend() -> Results:
        output, _ = layer(rows, segment)
        return results(output, rows, problem, dict(layer.named_parameters()))

    return attend if problem.backward else torch.no_grad()(attend)


def prepare_official(problem: LayerProblem, *, kind: str, compiles: bool) -> Callable[[], Results]:
    """The official style, on the same values in its own layout (sequence first)."""
    weights = problem.weights[kind]
    width, heads = problem.hidden_states.shape[-1], problem.configs[kind].num_attention_heads
    with torch.device(problem.hidden_states.device):
        layer = OfficialRelativeAttention(kind, width, heads, DISTANCES)
    layer.load_state_dict(as_official(weights, DISTANCES))
    layer.to(problem.hidden_states.dtype).requires_grad_(problem.backward)
    rows = problem.hidden_states.detach().transpose(0, 1).contiguous().requires_grad_(problem.backward)
    memory = rows.shape[0] - problem.cotangent.shape[1]
    forward = torch.compile(layer, dynamic=True) if compiles else layer

    def attend() -> Results:
        output = forward(rows[memory:], rows).transpose(0, 1)
        found = results(output, rows, problem, dict(layer.named_parameters()))
        if not problem.backward:
            return found
        gradients = {name.removeprefix("grad "): value for name, value in found.items() if name.startswith("grad ")}
        ours = from_official(gradients, weights, DISTANCES)
        return {
            "output": found["output"],
            "grad hidden_states": gradients["hidden_states"].transpose(0, 1),
            **{f"grad {name}": value for name, value in ours.items()},
        }

    return attend if problem.backward else torch.no_grad()(attend)


def results(output: Tensor, rows: Tensor, problem: LayerProblem, parameters: dict[str, Tensor]) -> Results:
    """The output `[B, T, E]` and, with a backward pass, the gradients of `rows` and parameters, in their shapes."""
    if not problem.backward:
        return {"output": output}
    leaves = {"hidden_states": rows, **parameters}
    return with_gradients(output, leaves, problem.cotangent.to(output.dtype))


def make_problem(shape: Shape, settings: BenchmarkSettings, *, backward: bool) -> LayerProblem:
    """Random rows, and weights so large that an error in any term shows."""
    torch.manual_seed(settings.seed)
    hidden, rows = shape.heads * shape.width, shape.memory + shape.length
    configs, weights = {}, {}
    for kind in ATTENTION_TYPES:
        configs[kind] = RCMHAConfig(
            attention_type=kind,
            hidden_size=hidden,
            num_attention_heads=shape.heads,
            memory_type="segment",
            mem_len=shape.memory,
            max_position_embeddings=DISTANCES,
        )
        state = RCMHAAttention(configs[kind], layer_idx=0).state_dict()
        weights[kind] = {
            name: (torch.randn(value.shape) * (hidden**-0.5 if "proj" in name else 0.5)).to(
                settings.device, settings.dtype
            )
            for name, value in state.items()
        }
    drawn = (torch.randn(settings.batch_size, length, hidden) for length in (rows, shape.length))
    hidden_states, cotangent = (one.to(settings.device, settings.dtype) for one in drawn)
    return LayerProblem(hidden_states, cotangent, configs, weights, backward)


def cases(shape: Shape, settings: BenchmarkSettings) -> Iterator[Case]:
    """Forward, then forward with backward."""
    for backward in (False, True):
        yield make_case(shape, settings, backward=backward)


def make_case(shape: Shape, settings: BenchmarkSettings, *, backward: bool) -> Case:
    """One case."""
    problem = make_problem(shape, settings, backward=backward)
    times = settings.batch_size * (3 if backward else 1)
    return Case(
        passes=passes_of(backward),
        problem=problem,
        reference=lambda kind, dtype: prepare_ours(problem, kind=kind, implementation="eager", dtype=dtype)(),
        flops=lambda kind: relative_flops(shape, kind) * times,
    )


RELATIVE_ATTENTION = Subject(
    name="relative",
    function="rcmha",
    shapes=("8x16@128+128", "8x16@512+512"),
    quick_shapes=("8x16@128+128",),
    candidates=candidates,
    cases=cases,
)
