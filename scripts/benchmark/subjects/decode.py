"""Attention of one token over a cache. All candidates have the same cached tokens, each in its own cache format.

Our implementations are called as the layers of a model call them, without the checks of the op's entry point.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dynattn.modeling.ops.dcmha.attention import COMPOSING_IMPLEMENTATIONS, IMPLEMENTATIONS
from dynattn.modeling.ops.dcmha.composition import SIDES, pack_side, unpack_factors

from ..baselines.dcmha import attend_sdpa, attend_whole, decode_with_matrices, key_matrix_cache, mixing_matrices
from ..harness.accuracy import Results
from ..harness.inputs import COMPOSED, PLAIN, OpInputs, evaluate, inputs_of, reference_results
from ..harness.interface import COMPILED, Candidate, Case, Role, Subject
from ..harness.settings import BenchmarkSettings
from ..harness.shapes import Shape
from .attention import OpProblem, in_graph, make_candidate, op_traffic
from .op_flops import attention_flops

# The candidates that are also measured in a CUDA graph.
IN_GRAPHS = ("triton", "sdpa")


def candidates(device: torch.device) -> list[Candidate]:
    """Every implementation, eager and compiled: for one token the Python around the op is a large part of the time."""
    entries: list[tuple[str, Role, str, Callable[[OpInputs], Tensor]]] = [
        (name, "ours", COMPOSED, partial(attend_step, implementation=name)) for name in COMPOSING_IMPLEMENTATIONS
    ]
    entries += [("sdpa", "plain", PLAIN, attend_sdpa), ("matmul", "plain", PLAIN, attend_whole)]
    found = []
    for name, role, function, attend in entries:
        found += [make_candidate(name, role, function, attend)]
        found += [make_candidate(f"{name}{COMPILED}", role, function, attend, compiles=True)]
    if device.type == "cuda":
        found += [in_graph(one) for one in found if one.name in IN_GRAPHS]
    for compiles, ending in ((False, ""), (True, COMPILED)):
        prepare = partial(prepare_official, compiles=compiles)
        found += [Candidate(f"official{ending}", "other", COMPOSED, prepare)]
    return found


def attend_step(inputs: OpInputs, *, implementation: str) -> Tensor:
    """One of our implementations. Returns `[B, 1, H, D]`; the query sees every key that is not padding."""
    output, _ = IMPLEMENTATIONS[implementation](**inputs.arguments())
    return output


def prepare_official(problem: OpProblem, *, compiles: bool) -> Callable[[], Results]:
    """Builds the cache of `[B, S, 2, H, H]` matrices before the clock starts; each step builds the query's own."""
    key_matrices = key_matrix_cache(problem.inputs[COMPOSED])
    decode = torch.compile(decode_with_matrices) if compiles else decode_with_matrices

    def attend(inputs: OpInputs) -> Tensor:
        """Returns `[B, 1, H, D]`."""
        assert inputs.pre is not None and inputs.post is not None
        query_matrices = mixing_matrices("query", inputs.pre, inputs.post)
        return decode(inputs.query, inputs.key, inputs.value, query_matrices, key_matrices, inputs.visible)

    return partial(evaluate, attend, problem.inputs[COMPOSED], backward=False)


def cases(shape: Shape, settings: BenchmarkSettings) -> Iterator[Case]:
    """A cache as long as the shape or the window: full, and with a quarter of it padding."""
    keys = min(shape.length, settings.window or shape.length)
    inputs = inputs_of(shape, settings, queries=1, keys=keys)
    inputs[COMPOSED] = packed(inputs[COMPOSED])
    visible = torch.ones(settings.batch_size, 1, 1, keys, dtype=torch.bool, device=settings.device)
    visible[..., : keys // 4] = False
    padded = {name: replace(one, visible=visible) for name, one in inputs.items()}
    yield make_case(inputs, inputs, shape, settings)
    real = {name: one.with_keys(slice(keys // 4, None)) for name, one in inputs.items()}
    yield make_case(padded, real, shape, settings, note="a quarter padding")


def packed(inputs: OpInputs) -> OpInputs:
    """The same inputs, but the terms of a side are views of one tensor `[B, P * terms, 1 or S, H]`.

    So a cache keeps those of the keys; those of a single query lie in the same order where a layer generates them.
    """
    pre, post = dict[str, Tensor](), dict[str, Tensor]()
    for side in SIDES:
        terms: list[Any] = [pack_side(stage, side) for stage in (inputs.pre, inputs.post) if stage is not None]
        rows = torch.cat(terms, dim=2).transpose(1, 2).contiguous()
        pre[side], post[side] = rows.transpose(1, 2).chunk(2, dim=2)
    return replace(inputs, pre=unpack_factors(pre), post=unpack_factors(post))


def make_case(
    inputs: dict[str, OpInputs], real: dict[str, OpInputs], shape: Shape, settings: BenchmarkSettings, note: str = ""
) -> Case:
    """A case with the inputs of each function; those without padding, `real`, tell how much work there is."""
    keys = real[COMPOSED].key.shape[2]
    return Case(
        passes="forward",
        problem=OpProblem(inputs, backward=False),
        reference=lambda function, dtype: reference_results(inputs[function], dtype, backward=False),
        flops=lambda function: attention_flops(shape, keys, function) * settings.batch_size,
        traffic=lambda function: op_traffic(real[function]),
        window=settings.window,
        note=note,
    )


DECODE = Subject(
    name="decode",
    function=COMPOSED,
    shapes=("16x64@2048", "32x128@2048"),
    quick_shapes=("4x32@512",),
    candidates=candidates,
    cases=cases,
)
