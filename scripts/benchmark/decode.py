"""One token against a cache: attention only. The same cached tokens for all, each in the form that it keeps them."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from dynattn.modeling.ops.dcmha import COMPOSING

from .accuracy import Results
from .arguments import Settings
from .attention import OpProblem, attend_ours, call_op, contestant, op_traffic, self_compiling
from .contest import COMPILED, Case, Contestant, Subject, compiled
from .flops import decode_flops
from .opponents import attend_whole, decode_with_matrices, key_matrix_cache, mixing_matrices
from .problem import COMPOSED, PLAIN, Inputs, evaluate, make_inputs, truth_in
from .shapes import Shape


def contestants(device: torch.device) -> list[Contestant]:
    """Everything once as it is and once compiled: a token's work is small, and the loop around it is Python."""
    found = []
    for name in COMPOSING:
        attend = partial(call_op, implementation=name)
        found += [contestant(name, "ours", COMPOSED, partial(attend_ours, implementation=name))]
        found += [contestant(f"{name}{COMPILED}", "ours", COMPOSED, partial(attend_compiled, attend=compiled(attend)))]
    found += [contestant("sdpa", "plain", PLAIN, partial(attend_ours, implementation="sdpa"))]
    found += [contestant("matmul", "plain", PLAIN, attend_whole)]
    found += [contestant(f"matmul{COMPILED}", "plain", PLAIN, compiled(attend_whole))]
    for name, decode in (("official", decode_with_matrices), (f"official{COMPILED}", compiled(decode_with_matrices))):
        found += [Contestant(name, "other", COMPOSED, partial(prepare_official, decode=decode))]
    return found


def attend_compiled(inputs: Inputs, *, attend: Callable[[Inputs], Tensor]) -> Tensor:
    """Our op compiled from the outside, and from the inside where it does that."""
    with self_compiling(True):
        return attend(inputs)


def prepare_official(problem: OpProblem, *, decode: Callable[..., Tensor]) -> Callable[[], Results]:
    """Builds the cache of matrices before the clock starts; the query's own matrices are part of every step."""
    key_matrices = key_matrix_cache(problem.inputs[COMPOSED])

    def attend(inputs: Inputs) -> Tensor:
        assert inputs.pre is not None and inputs.post is not None
        query_matrices = mixing_matrices("query", inputs.pre, inputs.post)
        return decode(inputs.query, inputs.key, inputs.value, query_matrices, key_matrices)

    return partial(evaluate, attend, problem.inputs[COMPOSED], backward=False)


def cases(shape: Shape, settings: Settings) -> Iterator[Case]:
    """One case: a cache as long as the shape, or as the window."""
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
    yield Case(
        passes="forward",
        problem=OpProblem(inputs, backward=False),
        truth=lambda function, dtype: truth_in(inputs[function], dtype, backward=False),
        flops=lambda function: decode_flops(shape, keys, function) * settings.batch_size,
        traffic=lambda function: op_traffic(inputs[function]),
    )


DECODE = Subject(
    name="decode",
    function=COMPOSED,
    shapes=("16x64@2048", "32x128@2048"),
    quick_shapes=("4x32@512",),
    contestants=contestants,
    cases=cases,
)
