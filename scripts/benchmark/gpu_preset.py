"""`--preset gpu`: everything that a record of a GPU needs, in commands of at most ten minutes.

Correctness comes first. Then the constants of the Triton path are tuned, and everything else is measured with the best
of them. Parts for which there is no time are left out by name; the most important parts come first. The same command
with `--resume` measures what is left out, with the constants that were found, and `--parts` names parts to measure
without tuning. Everything runs in a process of its own, and another one goes on without the candidate, or the value of
a constant, that made a process crash, hang or lose the device.
"""

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dynattn.modeling.ops.dcmha.triton import tuning as kernel_tuning

from ..common.arguments import given_options
from ..common.atomic_file import read_json, write_json
from ..common.errors import UserError, first_line
from .arguments import BenchmarkArguments
from .gpu_tuning import compile_trials, find_constants
from .harness.interface import GLOBAL, GRAPH
from .harness.interruptions import check_device
from .harness.process import DeviceLostError
from .harness.tuning import TrialLog, TunableConstant, Tuning, override_constants, read_tuning
from .precompilation import Precompilation
from .report.record import RECORD

TUNING = "tuning.json"
# What a user can do about a damaged one.
RETUNE = "remove it to tune again"
# No case begins after this many seconds, so that the last one ends before ten minutes are over.
SECONDS, TUNING_SECONDS = 480.0, 170.0
# Tokens of a batch, as in FlashAttention-2's benchmarks (arXiv 2307.08691, section 4.1): so many that the time of
# kernels exceeds the time of their launches.
TOKENS = 16384

# What a user may give beside the preset, which sets everything else.
OPTIONS = ("preset", "device", "threads", "budget", "seed", "output", "overwrite", "resume", "redraw", "parts")
FUSED_PLAIN = ["sdpa", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn"]
WINDOWED_PLAIN = ["flex", "sdpa", "sdpa-efficient", "sdpa-cudnn"]  # PyTorch's FlashAttention takes no window
# Arguments that several parts share.
CORRECTNESS: dict[str, Any] = {
    "subjects": ["attention"],
    "shapes": ["16x64@500", "32x128@300"],
    "implementations": ["eager", "triton", "chunked", "sdpa"],
    "rounds": 1,
    "batch_size": 2,
}
DECODING: dict[str, Any] = {
    "subjects": ["decode"],
    "shapes": ["16x64@2048", "32x128@2048", "32x128@8192"],
    "implementations": ["triton-graph", "triton", "chunked", "sdpa-graph", "sdpa", "official"],
}
TRAINING: dict[str, Any] = {
    "subjects": ["training"],
    "shapes": ["16x64@2048"],
    "implementations": ["triton", "sdpa"],
    "batch_size": 8,
    "rounds": 5,
    "layers": 24,
    "vocabulary": 50256,
}
# Layers with a window and without by turns, beside a plain model without any window.
WINDOWS: dict[str, Any] = {"window": 256, "layer_types": "LG", "implementations": ["triton", f"sdpa{GLOBAL}"]}
# Six layers, because each one makes the compilation longer.
IN_GRAPHS: dict[str, Any] = {
    "implementations": ["triton-graph", "sdpa-graph", f"sdpa{GLOBAL}{GRAPH}"],
    "layers": 6,
    "budget": 150.0,
}


# Measures what the arguments say into a folder, beginning no case after a time on the monotonic clock; returns whether
# everything is right.
Measure = Callable[[BenchmarkArguments, Path, float], bool]


@dataclass(frozen=True)
class PresetPart:
    """One run of the benchmark, by the arguments that differ from the preset's."""

    name: str
    options: dict[str, Any]


def _attention(
    name: str, lengths: Sequence[int], batch_size: int, implementations: list[str], window: int | None = None
) -> PresetPart:
    """A part that measures attention with both widths of heads."""
    shapes = [f"{heads}@{length}" for length in lengths for heads in ("16x64", "32x128")]
    shared = {"subjects": ["attention"], "implementations": implementations}
    return PresetPart(name, shared | {"shapes": shapes, "batch_size": batch_size, "window": window})


GPU = (
    PresetPart("correctness", CORRECTNESS | {"dtype": "float32"}),
    PresetPart("correctness-tuned", CORRECTNESS | {"shapes": ["8x64@500", *CORRECTNESS["shapes"]]}),
    *(
        _attention(f"attention-{length}", [length], TOKENS // length, ["triton", "triton-graph", *FUSED_PLAIN])
        for length in (2048, 4096, 8192)
    ),
    PresetPart("training-405m", TRAINING),
    PresetPart("training-405m-windows", TRAINING | WINDOWS),
    _attention(
        "window", [4096], TOKENS // 4096, ["triton", "triton-graph", "triton-plain", *WINDOWED_PLAIN], window=256
    ),
    PresetPart("decode-1", DECODING),
    PresetPart("decode-16", DECODING | {"batch_size": 16}),
    _attention("official", [2048, 4096], 2, ["triton", "sdpa-flash", "flex", "official", "official-compiled"]),
    PresetPart("training-405m-4096", TRAINING | {"shapes": ["16x64@4096"], "batch_size": 4}),
    PresetPart("training-graph", TRAINING | WINDOWS | IN_GRAPHS),
)


def options_of(part: PresetPart, arguments: BenchmarkArguments) -> BenchmarkArguments:
    """The arguments of a part; by default bfloat16."""
    shared = {"dtype": "bfloat16", "device": arguments.device_name, "budget": arguments.budget or 40.0}
    return replace(arguments, preset=None, parts=None, **{**shared, **part.options})


def check_preset(arguments: BenchmarkArguments) -> None:
    """Raises UserError for an option that the preset sets by itself, an unknown part, or without a GPU."""
    if given := [name for name in given_options(arguments) if name not in OPTIONS]:
        raise UserError(
            f"--preset gpu decides {', '.join(given)} by itself, for each of its parts; leave it out, or measure one "
            "part without the preset"
        )
    names = [part.name for part in GPU]
    if unknown := [name for name in arguments.parts or [] if name not in names]:
        raise UserError(f"the preset has no part {unknown[0]!r}; its parts are {', '.join(names)}")
    if not arguments.device_name.startswith("cuda"):
        raise UserError(
            f"--preset gpu, but --device {arguments.device} is no GPU; give cuda or cuda:1 ..., or measure without the "
            "preset"
        )
    if not torch.cuda.is_available():
        raise UserError("--preset gpu needs a CUDA device, and none was found; without the preset, --device cpu works")


def chosen_parts(arguments: BenchmarkArguments) -> tuple[PresetPart, ...]:
    """The parts to measure, in the preset's order."""
    return tuple(part for part in GPU if arguments.parts is None or part.name in arguments.parts)


def forget_parts(arguments: BenchmarkArguments, folder: Path) -> None:
    """Removes what an earlier preset has measured, and found, so that none of it passes for a part of the next one."""
    for part in chosen_parts(arguments):
        (folder / part.name / RECORD).unlink(missing_ok=True)
    if arguments.parts is None:
        (folder / TUNING).unlink(missing_ok=True)


def run_preset(arguments: BenchmarkArguments, folder: Path, run: Measure, end: float) -> bool:
    """Runs the parts, each into a folder of its own; returns whether everything that was measured is right.

    With `arguments.resume`, constants that an earlier command found in `folder` are not tuned again. With
    `arguments.parts` they are used if they are there, and nothing is tuned.

    Args:
        run: measures the parts.
        end: when the last case may begin.

    Raises:
        DeviceLostError: another process has to go on.
    """
    chosen = chosen_parts(arguments)
    if arguments.parts is None:
        is_right, best = _run_and_tune(chosen[0], arguments, folder, run, end)
        chosen = chosen[1:]
    else:
        is_right, best = True, _found_constants(folder)
    left_out: list[str] = []
    with override_constants(kernel_tuning, best):
        for part in chosen:
            if time.monotonic() < end:
                is_right &= _run_part(part, arguments, folder / part.name, run, end)
            else:
                left_out.append(part.name)
    if left_out:
        print(f"\nleft out because {SECONDS:.0f} seconds are over: {', '.join(left_out)}; --resume measures them")
    return is_right


def _run_and_tune(
    part: PresetPart, arguments: BenchmarkArguments, folder: Path, run: Measure, end: float
) -> tuple[bool, dict[TunableConstant, Any]]:
    """Runs the first part and tunes; returns whether everything in the part is right, and the best constants.

    What an earlier command has tuned stays. Trials are compiled meanwhile, and no longer, because the other parts are
    measured after it.
    """
    options, file = options_of(part, arguments), folder / TUNING
    earlier = read_json(file, RETUNE) if arguments.resume and file.exists() else {"trials": []}
    if "best" in earlier:
        is_right, tuning = _run_part(part, arguments, folder / part.name, run, end), read_tuning(earlier)
    else:
        with compile_trials(options) as compiling:
            is_right = _run_part(part, arguments, folder / part.name, run, end)
            until = min(end, time.monotonic() + TUNING_SECONDS)
            tuning = _tune(options, file, earlier["trials"], until, compiling)
    print(f"\ntuned{'' if tuning.finished else ' as far as time allowed'}: {tuning.as_record()['best']}")
    return is_right, tuning.best


def _found_constants(folder: Path) -> dict[TunableConstant, Any]:
    """The constants that an earlier command has found; none if it was interrupted before, or tuned nothing."""
    file = folder / TUNING
    found = read_json(file, RETUNE) if file.exists() else {}
    return read_tuning(found).best if "best" in found else {}


def _run_part(part: PresetPart, arguments: BenchmarkArguments, folder: Path, run: Measure, end: float) -> bool:
    """Returns whether everything in a part is right; a part that cannot be measured costs no other part its turn."""
    options = options_of(part, arguments)
    with failures_told(f"the part {part.name} is left unfinished", options):
        return run(options, folder, end)
    return False


def _tune(
    arguments: BenchmarkArguments, file: Path, earlier: list[dict[str, Any]], end: float, compiling: Precompilation
) -> Tuning:
    """Tunes, behind the `earlier` trials that another process has made, and writes the outcome to the file."""
    log = TrialLog(earlier, lambda trials: write_json(file, {"trials": trials}, indent=1))
    tuning = Tuning({}, log.made, finished=False)  # what stays if nothing can be tuned
    with failures_told("nothing is tuned", arguments):
        tuning = find_constants(arguments, end, log, compiling)
    write_json(file, tuning.as_record(), indent=1)
    return tuning


@contextmanager
def failures_told(outcome: str, arguments: BenchmarkArguments) -> Iterator[None]:
    """Tells a failure in the block with its outcome and goes on behind the block, unless the device is lost."""
    try:
        yield
    except (UserError, DeviceLostError):
        raise
    except Exception as error:  # memory may not suffice for inputs, and compilers raise exceptions of any type
        traceback.print_exc()
        print(f"\n{outcome}: {error}")
        check_device(torch.device(arguments.device_name), first_line(error))
