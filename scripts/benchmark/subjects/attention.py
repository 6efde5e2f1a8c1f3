"""The attention op: forward, and forward with backward."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate.utils import patch_environment
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dynattn.modeling.ops.dcmha.attention import COMPOSING_IMPLEMENTATIONS, dcmha_attention
from dynattn.modeling.ops.dcmha.composition import Composition

from ..baselines import x_transformers
from ..baselines.dcmha import attend_in_chunks, attend_sdpa, attend_whole
from ..harness.accuracy import Results
from ..harness.cuda_graphs import captured
from ..harness.inputs import (
    COMPOSED,
    GATES,
    PLAIN,
    POST,
    QUERY,
    STATIC,
    OpInputs,
    evaluate,
    inputs_of,
    reference_results,
    requiring_grad,
)
from ..harness.interface import COMPILED, GRAPH, Candidate, Case, Role, Subject, passes_of
from ..harness.settings import BenchmarkSettings
from ..harness.shapes import Shape, visible_pairs
from .op_flops import attention_flops

# The kernels of SDPA on a GPU; each is a candidate by its own name.
SDPA_KERNELS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
}

# The environment variable that decides whether `chunked` compiles parts of itself, and its values by candidate. With
# "auto" the op may begin to compile after a process has computed a lot, but not for float32 on a CPU.
COMPILE_VARIABLE = "DYNATTN_COMPILE"
COMPILE_MODES = {"chunked": "auto", f"chunked{COMPILED}": "1", "chunked-stepwise": "0"}


class OpProblem(NamedTuple):
    """Inputs by function, and whether a call includes the backward pass."""

    inputs: dict[str, OpInputs]
    backward: bool


def candidates(device: torch.device) -> list[Candidate]:
    """Ours, whole and in parts; every plain attention that could be the fastest; the official style; talking heads."""
    found = [
        make_candidate(name, "ours", COMPOSED, partial(call_op, implementation=implementation), mode=mode)
        for name, implementation, mode in ours()
    ]
    found += [
        make_candidate(f"chunked-{function}", "ours", function, partial(call_op, implementation="chunked"))
        for function in (STATIC, POST, QUERY, GATES)
    ]
    sdpa = partial(make_candidate, role="plain", function=PLAIN, arrange=with_window_mask)
    found += [sdpa("sdpa", attend=attend_sdpa)]
    if device.type == "cuda":
        found += [in_graph(one) for one in found if one.name == "triton"]
        found += [sdpa(name, attend=sdpa_kernel(kernel)(attend_sdpa)) for name, kernel in SDPA_KERNELS.items()]
        found += [Candidate("flex", "plain", PLAIN, prepare_flex)]
    found += [make_candidate("matmul", "plain", PLAIN, attend_whole)]
    found += [
        make_candidate(f"{name}-plain", "plain", PLAIN, partial(attend_uncomposed, implementation=name))
        for name in COMPOSING_IMPLEMENTATIONS
        if name != "eager"
    ]
    in_chunks: tuple[tuple[str, Role, str], ...] = (
        ("chunks", "plain", PLAIN),
        ("talking-heads", "other", STATIC),
        ("official", "other", COMPOSED),
    )
    for name, role, function in in_chunks:
        found += [make_candidate(name, role, function, attend_in_chunks)]
        found += [make_candidate(f"{name}{COMPILED}", role, function, partial(attend_in_chunks, compile_rows=True))]
    if x_transformers.is_installed():
        found += [make_candidate("x-transformers", "other", STATIC, x_transformers.attend)]
    return found


def ours() -> list[tuple[str, str, str]]:
    """Every composing implementation as (name, implementation, compile mode)."""
    modes = [(name, "chunked", mode) for name, mode in COMPILE_MODES.items()]
    names = COMPOSING_IMPLEMENTATIONS
    return [one for name in names for one in (modes if name == "chunked" else [(name, name, "auto")])]


def make_candidate(
    name: str,
    role: Role,
    function: str,
    attend: Callable[[OpInputs], Tensor],
    *,
    compiles: bool = False,
    mode: str = "auto",
    arrange: Callable[[OpInputs], OpInputs] = lambda inputs: inputs,
) -> Candidate:
    """A candidate from `attend`, which takes the inputs of its function and returns `[B, T, H, D]`.

    Args:
        mode: what our op compiles, in the forward and in the backward pass.
        arrange: what is done with the inputs before the clock starts.
    """

    def prepare(problem: OpProblem) -> Callable[[], Results]:
        compiled = torch.compile(attend) if compiles else attend
        call = partial(evaluate, compiled, arrange(problem.inputs[function]), backward=problem.backward)
        return compiling_as(mode)(call)

    return Candidate(name, role, function, prepare)


def in_graph(candidate: Candidate) -> Candidate:
    """A candidate for the op in a CUDA graph, which leaves out the time that launches take."""

    def prepare(problem: OpProblem) -> Callable[[], Results]:
        return captured(candidate.prepare(problem), problem.inputs[candidate.function].query.device)

    return replace(candidate, name=f"{candidate.name}{GRAPH}", prepare=prepare)


def call_op(inputs: OpInputs, implementation: str) -> Tensor:
    """Our op as its users call it. Returns `[B, T, H, D]`."""
    return dcmha_attention(**inputs.arguments(), implementation=implementation)


@contextmanager
def compiling_as(mode: str) -> Iterator[None]:
    """Sets the variable that decides what our op compiles, for a while."""
    with patch_environment(**{COMPILE_VARIABLE: mode}):
        yield


def attend_uncomposed(inputs: OpInputs, *, implementation: str) -> Tensor:
    """Our op with empty compositions, which shows what its loop alone costs. Returns `[B, T, H, D]`."""
    absent = Composition()
    return call_op(replace(inputs, pre=absent, post=absent), implementation)


def with_window_mask(inputs: OpInputs) -> OpInputs:
    """The same inputs with a mask `[1, 1, T, S]` for their window, which a model makes once for all its layers."""
    if inputs.window is None:
        return inputs
    mask = inputs.mask_by_position()
    assert mask is not None
    return replace(inputs, window=None, is_causal=False, visible=mask[None, None])


def prepare_flex(problem: OpProblem) -> Callable[[], Results]:
    """PyTorch's FlexAttention, compiled. Which blocks of keys it can skip is found out before the clock starts."""
    inputs = problem.inputs[PLAIN]
    attend = partial(attend_flex, blocks=flex_blocks(inputs), flex=torch.compile(flex_attention))
    return partial(evaluate, attend, inputs, backward=problem.backward)


def attend_flex(inputs: OpInputs, *, blocks: BlockMask, flex: Callable[..., Any] = flex_attention) -> Tensor:
    """FlexAttention over the keys of `blocks`. Returns `[B, T, H, D]`."""
    return flex(inputs.query, inputs.key, inputs.value, block_mask=blocks, scale=inputs.scaling).transpose(1, 2)


def flex_blocks(inputs: OpInputs) -> BlockMask:
    """The keys that each query sees, in FlexAttention's form."""
    queries, keys = inputs.query.shape[2], inputs.key.shape[2]
    ahead = 0 if inputs.is_causal else keys
    reach = keys if inputs.window is None else inputs.window - 1

    def is_visible(item: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + (keys - queries) - key
        return (distance <= reach) & (distance >= -min(ahead, reach))

    return create_block_mask(is_visible, None, None, queries, keys, device=inputs.query.device)


def cases(shape: Shape, settings: BenchmarkSettings, *, is_causal: bool = True) -> Iterator[Case]:
    """Forward, then forward with backward."""
    inputs = inputs_of(shape, settings, window=settings.window, is_causal=is_causal)
    for backward in (False, True):
        yield make_case(inputs, shape, settings, backward=backward, is_causal=is_causal)


def make_case(
    inputs: dict[str, OpInputs], shape: Shape, settings: BenchmarkSettings, *, backward: bool, is_causal: bool
) -> Case:
    """One case with the inputs of each function."""
    window, times = settings.window, settings.batch_size * (3 if backward else 1)
    # Without causality there is no window.
    pairs = visible_pairs(shape.length, window) if is_causal else shape.length**2
    given = {name: requiring_grad(one) for name, one in inputs.items()} if backward else inputs
    return Case(
        passes=passes_of(backward),
        problem=OpProblem(given, backward),
        reference=lambda function, dtype: reference_results(inputs[function], dtype, backward=backward),
        flops=lambda function: attention_flops(shape, pairs, function) * times,
        traffic=lambda function: op_traffic(inputs[function]) * (2 if backward else 1),
        window=window,
    )


def op_traffic(inputs: OpInputs) -> float:
    """Bytes of all inputs and of the output; a backward pass reads and writes about as many again."""
    return sum(leaf.nbytes for leaf in inputs.leaves().values()) + inputs.cotangent.nbytes


ATTENTION = Subject(
    name="attention",
    function=COMPOSED,
    shapes=("16x64@512", "16x64@2048", "32x128@1024"),
    quick_shapes=("4x32@256", "4x32@512"),
    candidates=candidates,
    cases=cases,
)


def bidirectional_candidates(device: torch.device) -> list[Candidate]:
    """Those that can attend to later tokens; x-transformers is causal here."""
    return [one for one in candidates(device) if one.name != "x-transformers"]


# As in encoders and vision transformers: 197 tokens are an image of 224 x 224 pixels in patches of 16 x 16.
BIDIRECTIONAL = Subject(
    name="bidirectional",
    function=COMPOSED,
    shapes=("12x64@197", "12x64@512"),
    quick_shapes=("4x32@100",),
    candidates=bidirectional_candidates,
    cases=partial(cases, is_causal=False),
)
