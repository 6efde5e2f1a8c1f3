"""Measures every attention path beside its strongest opponents, and refuses ratios to those that are wrong.

Run: `dynattn benchmark [--quick] [--subjects attention decode ...] [--shapes 16x64@2048 ...] [--device cuda]`
"""

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..arguments import parse_arguments
from ..errors import UserError
from .accuracy import LARGEST_MULTIPLE, RMS_MULTIPLE
from .arguments import BenchmarkArguments, Settings, listed, read_settings
from .attention import ATTENTION
from .contest import COMPILED, Case, Contestant, Subject, run_case
from .decode import DECODE
from .measuring import copy_rate, gemm_rate
from .models import PREFILL, TRAINING
from .plots import draw_plots
from .process import circumstances, pin_process
from .relative import RELATIVE_ATTENTION
from .shapes import Shape, parse_shape
from .tables import format_case, format_record

SUBJECTS = {subject.name: subject for subject in (ATTENTION, TRAINING, PREFILL, DECODE, RELATIVE_ATTENTION)}
RECORD, TABLE = "record.json", "table.md"
Entries = tuple[Subject, list[Contestant]]


def main(argv: Sequence[str]) -> int:
    """Measures, prints each table as it is done, writes record and plots; returns 1 where a contestant is wrong."""
    arguments = parse_arguments(BenchmarkArguments, argv, prog="dynattn benchmark", description=__doc__)
    if arguments.redraw is not None:
        write_record(read_record(arguments.redraw), check_output(arguments))
        return 0
    settings = read_settings(arguments)
    entries, left_out = choose(arguments, settings)
    folder = check_output(arguments)
    pin_process(argv, arguments.threads)
    record = measure(entries, settings, circumstances(argv, settings.device) | {"left_out": left_out})
    write_record(record, folder)
    print(f"\nwritten: {folder}/{{{RECORD},{TABLE},*.png}}")
    return int(any(blames(row) for case in record["cases"] for row in case["rows"]))


def choose(arguments: BenchmarkArguments, settings: Settings) -> tuple[list[Entries], list[str]]:
    """Returns the subjects asked for, each with the contestants asked for, and the names of those left out.

    Raises:
        UserError: a name that does not exist, or a shape or window that a subject cannot use.
    """
    names = known(listed(arguments.subjects or list(SUBJECTS)), SUBJECTS, "subject")
    if any(shape.memory for shape in settings.shapes) and names != [RELATIVE_ATTENTION.name]:
        raise UserError(f"a shape with +MEMORY is for --subjects {RELATIVE_ATTENTION.name} alone")
    if settings.window is not None and RELATIVE_ATTENTION.name in names:
        raise UserError(f"--window is not for the subject {RELATIVE_ATTENTION.name}; name other --subjects")
    entries = [(SUBJECTS[name], SUBJECTS[name].contestants(settings.device)) for name in names]
    every = list(dict.fromkeys(contestant.name for _, found in entries for contestant in found))
    # Compiling takes minutes that a quick look does not have.
    default = [name for name in every if not (settings.quick and name.endswith(COMPILED))]
    wanted = known(listed(arguments.implementations or default), every, "implementation")
    chosen = [(subject, [one for one in found if one.name in wanted]) for subject, found in entries]
    return [(subject, found) for subject, found in chosen if found], [name for name in every if name not in wanted]


def known(names: Sequence[str], choices: Sequence[str] | dict[str, Any], kind: str) -> Sequence[str]:
    """Returns `names`.

    Raises:
        UserError: one of them is not among the choices.
    """
    for name in names:
        if name not in choices:
            raise UserError(f"unknown {kind} {name!r}; choose from {', '.join(choices)}")
    return names


def measure(entries: Sequence[Entries], settings: Settings, about: dict[str, Any]) -> dict[str, Any]:
    """Runs all cases and returns the record."""
    machine = {
        "gemm_flops_per_second": gemm_rate(settings.dtype, settings.device),
        "copy_bytes_per_second": copy_rate(settings.device),
    }
    print(f"$ {shlex.join(about['command'])}\n{about['hardware']}, {about['threads']} threads, {about['allocator']}")
    limits = {"rms": RMS_MULTIPLE, "largest": LARGEST_MULTIPLE}
    record: dict[str, Any] = {**about, "error_multiples": limits, "machine": machine, "cases": []}
    for subject, contestants in entries:
        for shape in shapes_of(subject, settings):
            for case in subject.cases(shape, settings):
                result = describe(subject, shape, case, settings) | {"rows": run_case(case, contestants, settings)}
                record["cases"].append(result)
                print(f"\n{format_case(result, machine['gemm_flops_per_second'])}", flush=True)
    return record | {"load_average_after": os.getloadavg()}


def shapes_of(subject: Subject, settings: Settings) -> Sequence[Shape]:
    """The shapes asked for, else the subject's own."""
    return settings.shapes or [parse_shape(one) for one in (subject.quick_shapes if settings.quick else subject.shapes)]


def describe(subject: Subject, shape: Shape, case: Case, settings: Settings) -> dict[str, Any]:
    """A case in the record, without its rows."""
    return {
        "subject": subject.name,
        "passes": case.passes,
        "shape": asdict(shape),
        "batch_size": settings.batch_size,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "window": settings.window,
        "floor_flops": case.flops(subject.function),
    }


def blames(row: dict[str, Any]) -> bool:
    """Whether a row must end the command with an error: wrong, or ours and broken (a ValueError only declines)."""
    if "failure" in row:
        return row["role"] == "ours" and not row["failure"].startswith("ValueError")
    return not row["verdict"]["correct"]


def check_output(arguments: BenchmarkArguments) -> Path:
    """The folder to write to, which exists afterwards.

    Raises:
        UserError: it holds a record already, or cannot be made.
    """
    folder = Path(arguments.output)
    if (folder / RECORD).exists() and not arguments.overwrite:
        raise UserError(f"{folder / RECORD} exists; choose another --output or pass --overwrite")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {error.strerror}") from error
    return folder


def read_record(path: str) -> dict[str, Any]:
    """An earlier run's record.

    Raises:
        UserError: it cannot be read, or is not a record.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the record {path}: {error}") from error
    if not isinstance(record, dict) or "cases" not in record:
        raise UserError(f"{path} is not the {RECORD} of a benchmark")
    return record


def write_record(record: dict[str, Any], folder: Path) -> None:
    """Writes record, table and plots."""
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / TABLE).write_text(format_record(record), encoding="utf-8")
    draw_plots(record, folder)
