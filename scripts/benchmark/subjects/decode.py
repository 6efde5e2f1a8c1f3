"""One token against a cache: attention only. The same cached tokens for all, each in the form that it keeps them.

Ours are called as layers of a model call them, behind the op's face, which checks shapes.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dynattn.modeling.ops.dcmha.attention import COMPOSING, IMPLEMENTATIONS

from ..baselines.dcmha import attend_whole, decode_with_matrices, key_matrix_cache, mixing_matrices
from ..harness.accuracy import Results
from ..harness.contest import COMPILED, Case, Contestant, Role, Subject
from ..harness.inputs import COMPOSED, PLAIN, Inputs, evaluate, make_inputs, truth_in
from ..harness.settings import Settings
from ..harness.shapes import Shape
from .attention import OpProblem, contestant, op_traffic
from .op_flops import decode_flops


def contestants(device: torch.device) -> list[Contestant]:
    """Everything once as it is and once compiled: a token's work is small, and the loop around it is Python."""
    entries: list[tuple[str, Role, str, Callable[[Inputs], Tensor]]] = [
        (name, "ours", COMPOSED, partial(attend_step, implementation=name)) for name in COMPOSING
    ]
    entries += [("sdpa", "plain", PLAIN, partial(attend_step, implementation="sdpa"))]
    entries += [("matmul", "plain", PLAIN, attend_whole)]
    found = []
    for name, role, function, attend in entries:
        found += [contestant(name, role, function, attend)]
        found += [contestant(f"{name}{COMPILED}", role, function, torch.compile(attend))]
    for name, decode in (
        ("official", decode_with_matrices),
        (f"official{COMPILED}", torch.compile(decode_with_matrices)),
    ):
        found += [Contestant(name, "other", COMPOSED, partial(prepare_official, decode=decode))]
    return found


def attend_step(inputs: Inputs, *, implementation: str) -> Tensor:
    """One of our implementations; a single query sees every key that is not padding."""
    output, _ = IMPLEMENTATIONS[implementation](
        inputs.query,
        inputs.key,
        inputs.value,
        pre=inputs.pre,
        post=inputs.post,
        scaling=inputs.scaling,
        attention_mask=inputs.visible,
        is_causal=False,
        sliding_window=None,
    )
    return output


def prepare_official(problem: OpProblem, *, decode: Callable[..., Tensor]) -> Callable[[], Results]:
    """Builds the cache of matrices before the clock starts; the query's own matrices are part of every step."""
    key_matrices = key_matrix_cache(problem.inputs[COMPOSED])

    def attend(inputs: Inputs) -> Tensor:
        assert inputs.pre is not None and inputs.post is not None
        query_matrices = mixing_matrices("query", inputs.pre, inputs.post)
        return decode(inputs.query, inputs.key, inputs.value, query_matrices, key_matrices, inputs.visible)

    return partial(evaluate, attend, problem.inputs[COMPOSED], backward=False)


def cases(shape: Shape, settings: Settings) -> Iterator[Case]:
    """A cache as long as the shape, or as the window: full, and with a quarter of it padding (or not filled yet)."""
    keys = min(shape.length, settings.window or shape.length)
    inputs = make_inputs(
        shape.heads,
        shape.width,
        1,
        keys,
        batch=settings.batch_size,
        dtype=settings.dtype,
        device=settings.device,
        seed=settings.seed,
    )
    visible = torch.ones(settings.batch_size, 1, 1, keys, dtype=torch.bool, device=settings.device)
    visible[..., : keys // 4] = False
    padded = {name: replace(one, visible=visible) for name, one in inputs.items()}
    yield case(inputs, shape, keys, settings)
    yield case(padded, shape, keys, settings, note="a quarter padding")


def case(inputs: dict[str, Inputs], shape: Shape, keys: int, settings: Settings, note: str = "") -> Case:
    """A case with the inputs of each function."""
    return Case(
        passes="forward",
        problem=OpProblem(inputs, backward=False),
        truth=lambda function, dtype: truth_in(inputs[function], dtype, backward=False),
        flops=lambda function: decode_flops(shape, keys, function) * settings.batch_size,
        traffic=lambda function: op_traffic(inputs[function]),
        window=settings.window,
        note=note,
    )


DECODE = Subject(
    name="decode",
    function=COMPOSED,
    shapes=("16x64@2048", "32x128@2048"),
    quick_shapes=("4x32@512",),
    contestants=contestants,
    cases=cases,
)
