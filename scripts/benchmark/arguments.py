"""The arguments of `dynattn benchmark`.

Nothing here imports PyTorch, so that `--help` and mistyped options are answered at once.
"""

from dataclasses import dataclass
from typing import Literal

from ..common.arguments import option
from ..common.errors import UserError
from ..common.number_ranges import check_positive, check_seed
from .harness.shapes import parse_shape

ROUNDS, QUICK_ROUNDS = 7, 3


@dataclass
class BenchmarkArguments:
    """From options or a YAML file; lists may be separated by spaces or commas.

    Raises:
        UserError: a number is out of its range, or a shape is malformed.
    """

    subjects: list[str] | None = option(
        None,
        "what to measure: attention, block, training, prefill, decode, step, relative, bidirectional, "
        "long, positions, profile; all but the last four if not given",
    )
    shapes: list[str] | None = option(
        None, "HEADSxWIDTH@LENGTH, for relative also +MEMORY; each subject's own if not given"
    )
    implementations: list[str] | None = option(None, "measure only these candidates, by their names in the tables")
    dtype: Literal["float32", "bfloat16", "float16"] = option("float32", "number format")
    device: str | None = option(
        None, "where to compute: cpu, cuda, cuda:1 ...; if not given cpu, and cuda with --preset gpu"
    )
    threads: int | None = option(None, "threads on the CPU; OMP_NUM_THREADS if not given, or 1")
    window: int | None = option(None, "keys that a query sees, itself included; all if not given")
    layer_types: Literal["L", "LG", "LGLL"] = option(
        "L", "layers of a model with --window, repeated: L has the window, G sees all keys"
    )
    batch_size: int = option(1, "sequences in a batch")
    layers: int = option(2, "layers of the model (training and prefill)")
    vocabulary: int = option(2048, "vocabulary size of the model")
    rounds: int | None = option(
        None, f"rounds, each over all candidates; {ROUNDS} if not given, with --quick {QUICK_ROUNDS}"
    )
    budget: float | None = option(
        None,
        "seconds for a candidate, by default any number; if its first call takes longer, it is left out of "
        "this case and of those with more tokens; if its samples take longer in total, it stops after three rounds",
    )
    preset: Literal["gpu"] | None = option(
        None,
        "gpu: tune the Triton kernels and measure everything for a GPU's record, in runs of ten minutes "
        "that --resume continues",
    )
    parts: list[str] | None = option(
        None,
        "only these parts of the preset (an unknown name prints all names); nothing is tuned: the constants are those "
        "that an earlier command has found in --output, or the package's",
    )
    quick: bool = option(False, "small shapes, few rounds, nothing compiled: a minute")
    seed: int = option(0, "seed of inputs and weights")
    output: str = option("runs/benchmark", "folder for record.json, table.md and the plots")
    overwrite: bool = option(False, "replace the record that is in --output")
    resume: bool = option(False, "continue the record in --output: measure only the cases that it lacks")
    redraw: str | None = option(None, "a record.json whose table and plots are written to --output; measure nothing")

    def __post_init__(self) -> None:
        check_positive(self, ["threads", "window", "batch_size", "layers", "vocabulary", "rounds", "budget"])
        check_seed("seed", self.seed)
        if self.window is None and self.layer_types != "L":
            raise UserError(f"--layer_types {self.layer_types}, but no layer has a window; add --window")
        if self.resume and self.overwrite:
            raise UserError("--resume goes on with the record that --overwrite would replace; choose one of them")
        if self.parts is not None:
            self.parts = split_at_commas(self.parts)
            if not self.parts:
                raise UserError("--parts names no part; leave it out for all of them")
            if self.preset is None:
                raise UserError(f"--parts {' '.join(self.parts)} are parts of a preset; add --preset gpu")
        for name in ("subjects", "shapes", "implementations"):
            if (values := getattr(self, name)) and not split_at_commas(values):
                raise UserError(f"--{name} names none; leave it out for the usual ones")
        for shape in split_at_commas(self.shapes or []):
            parse_shape(shape)

    @property
    def device_name(self) -> str:
        """The device, also where none is given."""
        return self.device or ("cpu" if self.preset is None else "cuda")


def split_at_commas(values: list[str]) -> list[str]:
    """Splits each value at its commas; the command line has already split the list at spaces."""
    return [name for value in values for name in value.split(",") if name]
