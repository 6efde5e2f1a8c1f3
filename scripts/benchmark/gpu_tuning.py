"""What `--preset gpu` tunes: the values that are tried for constants of the Triton path, and how a trial is made."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dynattn.modeling.ops.dcmha.triton import tuning as kernel_tuning
from dynattn.modeling.ops.dcmha.triton.devices import shared_memory_of

from ..common.errors import first_line
from ..common.measuring import sample
from .arguments import BenchmarkArguments
from .harness.accuracy import judge
from .harness.cuda_graphs import captured
from .harness.interruptions import check_device, end_when_hanging
from .harness.settings import BenchmarkSettings, read_settings
from .harness.shapes import parse_shape
from .harness.tuning import TrialLog, TunableConstant, Tuning, override_constants, tune
from .precompilation import Call, Precompilation, Target
from .subjects.attention import candidates, cases

# The tuner waits so long for what is compiled ahead of it.
COMPILING_SECONDS = 60.0
# Shapes and windows to tune for, forward and backward: long sequences of both head widths, and a window.
TUNED_SHAPES = (("16x64@4096", None), ("32x128@2048", None), ("16x64@4096", 256))
TUNED_CANDIDATE, TUNED_BATCH, TRIAL_SAMPLES = "triton", 4, 5
# (queries, keys, warps) of a tile; (queries, keys, warps, stages of loading) in the kernels that hold all heads.
TILES = tuple((queries, keys, warps) for queries in (8, 16, 32) for keys in (32, 64, 128) for warps in (4, 8))
MATRIX_TILES = {
    "MATRIX_TILES_16": (
        *((1, 16, 1, 3), (4, 16, 4, 3), (4, 16, 4, 4)),
        *((1, 32, 1, 3), (4, 32, 4, 3), (4, 32, 4, 4), (4, 32, 4, 5)),
    ),
    "MATRIX_TILES_32": ((1, 16, 1, 3), (2, 16, 2, 3), (4, 16, 4, 3), (4, 16, 4, 4)),
}

# Which kernels serve: with this value the head-by-head kernels, for any number of heads.
FAMILY = TunableConstant("FEWEST_HEADS", (kernel_tuning.MOST_HEADS + 1,))
TILING = (
    TunableConstant("LARGEST_MAP", (1 << 26, 1 << 28)),
    TunableConstant("ROWS", (64, 256, 512)),
    TunableConstant("BLOCK", (32, 128)),
    TunableConstant("WINDOW_TILE", ((64, 64, 4), (64, 64, 8), (64, 32, 4), (32, 64, 4))),
)
HEAD_BY_HEAD_CONSTANTS = (*TILING, *(TunableConstant("TILES", TILES, name) for name in kernel_tuning.TILES))
TENSOR_CORE_CONSTANTS = (
    *TILING,
    TunableConstant("TURNS", (16, 32, 128)),
    *(
        TunableConstant(constant, tiles, name)
        for name in kernel_tuning.MATRIX_TILES_16
        for constant, tiles in MATRIX_TILES.items()
    ),
)


def compile_trials(arguments: BenchmarkArguments) -> Precompilation:
    """Begins to compile what the tuner will try if the kernels on the tensor cores are the faster ones."""
    device = torch.device(arguments.device_name)
    major, minor = torch.cuda.get_device_capability(device)
    trials: list[dict[TunableConstant, Any]] = [{}]
    trials += [{constant: value} for constant in (FAMILY, *TENSOR_CORE_CONSTANTS) for value in constant.values]
    calls = [Call(parse_shape(shape), TUNED_BATCH, window, torch.bfloat16) for shape, window in TUNED_SHAPES]
    return Precompilation(trials, calls, Target(10 * major + minor, shared_memory_of(device)))


def find_constants(arguments: BenchmarkArguments, end: float, log: TrialLog, compiling: Precompilation) -> Tuning:
    """Tunes the Triton path for bfloat16: first which kernels serve, then the constants of those kernels."""
    settings = read_settings(replace(arguments, dtype="bfloat16", batch_size=TUNED_BATCH))
    trial = make_trial(settings, TUNED_SHAPES, TUNED_CANDIDATE)
    compiling.wait(min(COMPILING_SECONDS, max(0.0, end - time.monotonic())))
    return tune_the_faster(trial, lambda: time.monotonic() < end, log)


def tune_the_faster(trial: Callable[[], float], has_time: Callable[[], bool], log: TrialLog) -> Tuning:
    """Finds the faster kind of kernels, and the best constants of that kind."""
    family = tune(kernel_tuning, (FAMILY,), trial, has_time, log)
    constants = HEAD_BY_HEAD_CONSTANTS if family.best[FAMILY] in FAMILY.values else TENSOR_CORE_CONSTANTS
    with override_constants(kernel_tuning, family.best):
        rest = tune(kernel_tuning, constants, trial, has_time, log)
    return Tuning(family.best | rest.best, log.made, rest.finished)


def make_trial(
    settings: BenchmarkSettings, shapes: tuple[tuple[str, int | None], ...], name: str
) -> Callable[[], float]:
    """A trial that returns the seconds of a candidate's forward and backward pass, as the geometric mean over `shapes`.

    On a GPU the passes are replayed by a CUDA graph. Launches depend on the CPU, and would hide what constants do.

    The trial raises ValueError if results are wrong, and DeviceLostError if it is the last one of this process.

    Args:
        shapes: shapes with their windows.
        name: the candidate.
    """
    (candidate,) = (one for one in candidates(settings.device) if one.name == name)
    calls = []
    for shape, window in shapes:
        *_, case = cases(parse_shape(shape), replace(settings, window=window))
        exact, reference = (case.reference(candidate.function, dtype) for dtype in (torch.float64, settings.dtype))
        calls.append((candidate.prepare(case.problem), exact, reference))

    def trial() -> float:
        timer = end_when_hanging(settings.budget, print)
        try:
            return measure()
        except Exception as error:  # Triton raises exceptions of its own that share no base class
            check_device(settings.device, first_line(error))
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def measure() -> float:
        seconds = []
        for call, exact, reference in calls:
            if not judge(call(), exact, reference).correct:
                raise ValueError("results are wrong")
            # The least, because what disturbs a sample only makes it longer, and by more than most constants change it.
            timed = captured(call, settings.device) if settings.device.type == "cuda" else call
            seconds.append(min(sample(timed, 1, settings.device) for _ in range(TRIAL_SAMPLES)))
        return statistics.geometric_mean(seconds)

    return trial
