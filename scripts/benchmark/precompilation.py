"""Compiles what the tuner of `--preset gpu` tries, in several processes, before it tries it.

A kernel takes seconds to compile, and there are hundreds. The processes make the calls of the trials on tensors without
memory, and compile the kernels without launching them, so they use no GPU. Triton keeps compiled kernels on disk, where
the trials find them.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from functools import partial
from multiprocessing import active_children, get_context
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynattn.modeling.ops.dcmha.triton import passes, tuning, workspace
from dynattn.modeling.ops.dcmha.triton.arguments import MapInputs, MapSettings

from ..common.workers import end_with_parent, submit
from .harness.inputs import RANK
from .harness.overrides import override_attributes
from .harness.shapes import Shape
from .harness.tuning import TunableConstant, override_constants

# Terms of each side of a stage of `COMPOSED` inputs: down and up of each rank, and a gate.
TERMS = 2 * RANK + 1
# Cores that are left to the process that measures.
SPARED_CORES = 2


class Call(NamedTuple):
    """A forward and a backward pass on `COMPOSED` inputs."""

    shape: Shape
    batch: int
    window: int | None
    dtype: torch.dtype


class Target(NamedTuple):
    """What the Triton path asks about a GPU."""

    capability: int  # as in 90
    shared_memory: int  # the bytes that a program may have


class AbsentDriver:
    """What Triton's compiler asks of the driver of a GPU, for a process that does not use it.

    Args:
        target: the `GPUTarget` to compile for.
    """

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Precompilation:
    """The processes, which compile from the start on.

    Args:
        trials: the values of constants, and only of those that differ from the module's own.
        calls: what each trial calls.
        target: the GPU.
    """

    def __init__(self, trials: Sequence[Mapping[TunableConstant, Any]], calls: Sequence[Call], target: Target) -> None:
        workers = min(max(1, len(os.sched_getaffinity(0)) - SPARED_CORES), max(1, len(trials) * len(calls)))
        self.pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=end_with_parent)
        self.futures = [
            submit(self.pool, compile_trial, dict(trial), call, target) for trial in trials for call in calls
        ]

    def wait(self, seconds: float) -> None:
        """Waits until everything is compiled, but no longer than this.

        What a process could not compile, the trial cannot compile either, and says so.
        """
        done, _ = wait(self.futures, timeout=seconds)
        print(f"\n{len(done)} of {len(self.futures)} calls of the tuner are compiled", flush=True)

    def __enter__(self) -> "Precompilation":
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        """Ends the processes once they have compiled what they are at, or at once if the block has failed."""
        for process in active_children() if failure else ():
            process.terminate()
        self.pool.shutdown(wait=False, cancel_futures=True)


def compile_trial(trial: Mapping[TunableConstant, Any], call: Call, target: Target) -> None:
    """Compiles the kernels of a call with these values of constants, for a GPU that this process does not use."""
    import triton
    from triton.backends.compiler import GPUTarget

    triton.runtime.driver.set_active(AbsentDriver(GPUTarget("cuda", target.capability, 32)))
    kernels = {name: _Compiling(kernel) for name, kernel in workspace.load_kernels(torch.device("cuda")).items()}
    with (
        override_constants(tuning, trial),
        override_attributes(workspace, {"load_kernels": lambda device: kernels}),
        override_attributes(passes, {"shared_memory_of": lambda device: target.shared_memory}),
        torch.no_grad(),
    ):
        inputs, settings = _inputs(call)
        output, lse = passes.attend(inputs, settings)
        passes.attend_backward(output, lse, inputs, settings)


class _Compiling:
    """A kernel that is compiled where it would be launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(self.kernel.warmup, grid=grid)


def _inputs(call: Call) -> tuple[MapInputs, MapSettings]:
    """Inputs without memory like those that `inputs_of` makes for `COMPOSED`."""
    heads, width, length = call.shape.heads, call.shape.width, call.shape.length

    def empty(*shape: int) -> Tensor:
        """An empty tensor `[*shape]`."""
        return torch.empty(*shape, dtype=call.dtype, device="meta")

    rows = [empty(call.batch, length, heads, width).transpose(1, 2) for _ in range(3)]
    terms = [empty(call.batch, length, TERMS, heads) for _ in range(4)]
    absent = [None] * (len(MapInputs._fields) - len(rows) - len(terms))
    return MapInputs(*rows, *terms, *absent), MapSettings(width**-0.5, True, call.window, 1)
