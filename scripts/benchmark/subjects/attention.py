"""The attention op: forward, and forward with backward."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dynattn.modeling.ops.dcmha.attention import COMPOSING, dcmha_attention
from dynattn.modeling.ops.dcmha.composition import Composition

from ..baselines.dcmha import attend_in_chunks, attend_whole
from ..harness.accuracy import Results
from ..harness.contest import COMPILED, Case, Contestant, Role, Subject
from ..harness.inputs import COMPOSED, PLAIN, STATIC, Inputs, evaluate, make_inputs, requiring_grad, truth_in
from ..harness.settings import Settings
from ..harness.shapes import Shape
from .op_flops import attention_flops

# On a GPU SDPA is several kernels; each competes by its own name.
SDPA_KERNELS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
}

# Where `chunked` is told whether to compile parts of itself, and its contestants by what they tell it. Its default may
# change its mind when a process has computed a lot, but not for float32 on a CPU.
SELF_COMPILING = "DYNATTN_COMPILE"
MODES = {"chunked": "auto", f"chunked{COMPILED}": "1", "chunked-stepwise": "0"}


class OpProblem(NamedTuple):
    """Inputs of each function."""

    inputs: dict[str, Inputs]
    backward: bool


def contestants(device: torch.device) -> list[Contestant]:
    """Ours, every plain attention that could be the best one, the official style, and static talking heads."""
    found = [
        contestant(name, "ours", COMPOSED, partial(attend_ours, implementation=implementation, mode=mode))
        for name, implementation, mode in ours(COMPOSING)
    ]
    found += [contestant("sdpa", "plain", PLAIN, partial(attend_ours, implementation="sdpa"))]
    if device.type == "cuda":
        found += [contestant(name, "plain", PLAIN, partial(attend_sdpa, kernel=name)) for name in SDPA_KERNELS]
    found += [contestant("matmul", "plain", PLAIN, attend_whole)]
    found += [
        contestant(f"{name}-plain", "plain", PLAIN, partial(attend_uncomposed, implementation=name))
        for name in COMPOSING
        if name != "eager"
    ]
    in_chunks: tuple[tuple[str, Role, str], ...] = (
        ("chunks", "plain", PLAIN),
        ("talking-heads", "other", STATIC),
        ("official", "other", COMPOSED),
    )
    for name, role, function in in_chunks:
        found += [contestant(name, role, function, attend_in_chunks)]
        found += [contestant(f"{name}{COMPILED}", role, function, partial(attend_in_chunks, compile_rows=True))]
    return found


def ours(implementations: Iterable[str]) -> list[tuple[str, str, str]]:
    """Names of contestants, each with its implementation and what that is told about compiling."""
    modes = [(name, "chunked", mode) for name, mode in MODES.items()]
    return [one for name in implementations for one in (modes if name == "chunked" else [(name, name, "auto")])]


def contestant(name: str, role: Role, function: str, attend: Callable[[Inputs], Tensor]) -> Contestant:
    """A contestant that takes the inputs of its function."""

    def prepare(problem: OpProblem) -> Callable[[], Results]:
        return partial(evaluate, attend, problem.inputs[function], backward=problem.backward)

    return Contestant(name, role, function, prepare)


def attend_ours(inputs: Inputs, *, implementation: str, mode: str = "auto") -> Tensor:
    """Our op, which compiles what it is told to."""
    with self_compiling(mode):
        return call_op(inputs, implementation)


def call_op(inputs: Inputs, implementation: str) -> Tensor:
    """Our op, as its users call it; a single query sees every key, and needs no mask to do so."""
    return dcmha_attention(
        inputs.query,
        inputs.key,
        inputs.value,
        pre=inputs.pre,
        post=inputs.post,
        attention_mask=inputs.visible,
        is_causal=inputs.query.shape[2] > 1,
        sliding_window=inputs.window,
        implementation=implementation,
    )


@contextmanager
def self_compiling(mode: str) -> Iterator[None]:
    """Tells our op what to compile, for a while."""
    before = os.environ.get(SELF_COMPILING)
    os.environ[SELF_COMPILING] = mode
    try:
        yield
    finally:
        if before is None:
            del os.environ[SELF_COMPILING]
        else:
            os.environ[SELF_COMPILING] = before


def attend_uncomposed(inputs: Inputs, *, implementation: str) -> Tensor:
    """Our op's machinery with nothing to compose: what its driver alone costs, and a control on weak baselines."""
    absent = Composition()
    return attend_ours(replace(inputs, pre=absent, post=absent), implementation=implementation)


def attend_sdpa(inputs: Inputs, *, kernel: str) -> Tensor:
    """PyTorch's attention on one of its GPU kernels, FlashAttention among them."""
    with sdpa_kernel(SDPA_KERNELS[kernel]):
        return attend_ours(inputs, implementation="sdpa")


def cases(shape: Shape, settings: Settings) -> Iterator[Case]:
    """Forward, then forward with backward."""
    window = settings.window
    inputs = make_inputs(
        shape.heads,
        shape.width,
        shape.length,
        shape.length,
        batch=settings.batch_size,
        dtype=settings.dtype,
        device=settings.device,
        seed=settings.seed,
        window=window,
    )
    for backward in (False, True):
        given = {name: requiring_grad(one) for name, one in inputs.items()} if backward else inputs

        def truth(function: str, dtype: torch.dtype, backward: bool = backward) -> Results:
            return truth_in(inputs[function], dtype, backward=backward)

        def flops(function: str, backward: bool = backward) -> float:
            forward = attention_flops(shape, window, function) * settings.batch_size
            return forward * (3 if backward else 1)

        def traffic(function: str, backward: bool = backward) -> float:
            return op_traffic(inputs[function]) * (2 if backward else 1)

        yield Case(
            passes="forward+backward" if backward else "forward",
            problem=OpProblem(given, backward),
            truth=truth,
            flops=flops,
            traffic=traffic,
            window=window,
        )


def op_traffic(inputs: Inputs) -> float:
    """Bytes of all inputs and of the output; a backward pass reads and writes about as many again."""
    return sum(leaf.nbytes for leaf in inputs.leaves().values()) + inputs.cotangent.nbytes


ATTENTION = Subject(
    name="attention",
    function=COMPOSED,
    shapes=("16x64@512", "16x64@2048", "32x128@1024"),
    quick_shapes=("4x32@256", "4x32@512"),
    contestants=contestants,
    cases=cases,
)
