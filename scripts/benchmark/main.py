"""Measures every attention path beside its strongest opponents, and refuses ratios to those that are wrong.

Run: `dynattn benchmark [--quick] [--subjects attention decode ...] [--shapes 16x64@2048 ...] [--device cuda]`
A GPU's whole record: `dynattn benchmark --preset gpu --output FOLDER`
"""

import json
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..common.arguments import parse_arguments
from ..common.errors import UserError
from ..common.measuring import copy_rate, gemm_rate
from .arguments import BenchmarkArguments, listed, read_settings
from .gpu_preset import GPU, check_device, run_preset
from .harness.accuracy import LARGEST_MULTIPLE, RMS_MULTIPLE
from .harness.contest import COMPILED, OVER_BUDGET, Case, Contestant, Subject, run_case
from .harness.process import circumstances, pin_process
from .harness.settings import Settings
from .harness.shapes import Shape, parse_shape
from .report.tables import case_title, format_case, format_record
from .subjects.attention import ATTENTION
from .subjects.decode import DECODE
from .subjects.generation_step import STEP
from .subjects.long_sequences import LONG
from .subjects.models import BLOCK, PREFILL, TRAINING
from .subjects.profile import PROFILE, add_profiles, pass_rate
from .subjects.relative import RELATIVE_ATTENTION

SUBJECTS = {
    one.name: one for one in (ATTENTION, BLOCK, TRAINING, PREFILL, DECODE, STEP, RELATIVE_ATTENTION, LONG, PROFILE)
}
# Hours, where the others take minutes; and what looks into one implementation, on a processor only.
ON_DEMAND = (LONG.name, PROFILE.name)
RECORD, TABLE = "record.json", "table.md"
Entries = tuple[Subject, list[Contestant]]


def main(argv: Sequence[str]) -> int:
    """Measures, prints each table as it is done, writes record and plots; returns 1 where a contestant is wrong."""
    arguments = parse_arguments(BenchmarkArguments, argv, prog="dynattn benchmark", description=__doc__)
    if arguments.redraw is not None:
        write_record(read_record(arguments.redraw), check_output(arguments))
        return 0
    if arguments.preset is not None:
        check_device()
    else:
        choose(arguments, read_settings(arguments))
    folder = check_output(arguments)
    pin_process(argv, arguments.threads)
    if arguments.preset is not None:
        return int(not run_preset(arguments, folder, partial(run, argv)))
    return int(not run(argv, arguments, folder))


def run(argv: Sequence[str], arguments: BenchmarkArguments, folder: Path, end: float | None = None) -> bool:
    """Measures what the arguments say and writes the record; returns whether nothing of it is wrong."""
    settings = replace(read_settings(arguments), end=end)
    entries, left_out = choose(arguments, settings)
    folder.mkdir(exist_ok=True)
    about = circumstances(argv, settings.device) | {"left_out": left_out}
    record = measure(entries, settings, about, partial(save, folder=folder))
    write_record(record, folder)
    print(f"\nwritten: {folder}/{{{RECORD},{TABLE},*.png}}")
    return not any(blames(row) for case in record["cases"] for row in case["rows"])


def choose(arguments: BenchmarkArguments, settings: Settings) -> tuple[list[Entries], list[str]]:
    """Returns the subjects asked for, each with the contestants asked for, and the names of those left out.

    Raises:
        UserError: a name that does not exist, or a shape or window that a subject cannot use.
    """
    names = known(
        listed(arguments.subjects or [name for name in SUBJECTS if name not in ON_DEMAND]), SUBJECTS, "subject"
    )
    if any(shape.memory for shape in settings.shapes) and names != [RELATIVE_ATTENTION.name]:
        raise UserError(f"a shape with +MEMORY is for --subjects {RELATIVE_ATTENTION.name} alone")
    for name in (RELATIVE_ATTENTION.name, STEP.name):
        if settings.window is not None and name in names:
            raise UserError(f"--window is not for the subject {name}; name other --subjects")
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


def measure(
    entries: Sequence[Entries], settings: Settings, about: dict[str, Any], keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Runs all cases and returns the record; `keep` gets what there is of it after each of them."""
    machine = {
        "gemm_flops_per_second": gemm_rate(settings.dtype, settings.device),
        "copy_bytes_per_second": copy_rate(settings.device),
        "pass_elements_per_second": pass_rate(settings.device),
    }
    print(f"$ {shlex.join(about['command'])}\n{about['hardware']}, {about['threads']} threads, {about['allocator']}")
    limits = {"rms": RMS_MULTIPLE, "largest": LARGEST_MULTIPLE}
    record: dict[str, Any] = {**about, "error_multiples": limits, "machine": machine, "cases": [], "cases_left_out": []}
    for subject, contestants in entries:
        for shape in shapes_of(subject, settings):
            for case in subject.cases(shape, settings):
                result = describe(subject, shape, case, settings)
                if settings.end is not None and time.monotonic() > settings.end:
                    record["cases_left_out"].append(case_title(result))
                    continue
                too_slow = slow_with_fewer_tokens(result, record["cases"])
                rows = run_case(case, contestants, settings, too_slow)
                if subject is PROFILE:
                    add_profiles(rows, case, shape, settings, machine)
                record["cases"].append(result | {"rows": rows})
                keep(record)
                print(f"\n{format_case(record['cases'][-1], machine['gemm_flops_per_second'])}", flush=True)
    return record | {"load_average_after": os.getloadavg()}


def slow_with_fewer_tokens(case: dict[str, Any], before: Sequence[dict[str, Any]]) -> set[str]:
    """Names of contestants that were over the budget in a case that differs from this one in being shorter."""

    def without_length(one: dict[str, Any]) -> list[Any]:
        shape = {name: value for name, value in one["shape"].items() if name != "length"}
        return [shape, *(one[name] for name in ("subject", "passes", "batch_size", "dtype", "window", "note"))]

    alike = [one for one in before if without_length(one) == without_length(case)]
    shorter = [one for one in alike if one["shape"]["length"] < case["shape"]["length"]]
    rows = [row for one in shorter for row in one["rows"]]
    return {row["name"] for row in rows if row.get("failure", "").startswith(OVER_BUDGET)}


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
        "window": case.window,
        "note": case.note,
        "floor_flops": case.flops(subject.function),
    }


def blames(row: dict[str, Any]) -> bool:
    """Whether a row must end the command with an error: wrong, or ours and broken (a ValueError only declines)."""
    if "failure" in row:
        return row["role"] == "ours" and not row["failure"].startswith(("ValueError", OVER_BUDGET))
    return not row["verdict"]["correct"]


def check_output(arguments: BenchmarkArguments) -> Path:
    """The folder to write to, which exists afterwards.

    Raises:
        UserError: it holds a record already (of a preset, its first part's), or cannot be made.
    """
    folder = Path(arguments.output)
    record = folder / RECORD if arguments.preset is None else folder / GPU[0].name / RECORD
    if record.exists() and not arguments.overwrite:
        raise UserError(f"{record} exists; choose another --output or pass --overwrite")
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


def save(record: dict[str, Any], folder: Path) -> None:
    """Writes the record whole: who is killed while it is written leaves the one before."""
    unfinished = folder / f"{RECORD}.unfinished"
    unfinished.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(folder / RECORD)


def write_record(record: dict[str, Any], folder: Path) -> None:
    """Writes record, table and plots."""
    save(record, folder)
    (folder / TABLE).write_text(format_record(record), encoding="utf-8")
    draw_plots(record, folder)


def draw_plots(record: dict[str, Any], folder: Path) -> None:
    """Draws everything, or says that it cannot: a machine that only measures needs no Matplotlib."""
    try:
        from .report.plots import draw_everything
    except ModuleNotFoundError as error:
        print(f"no plots: {error}; draw them elsewhere with `dynattn benchmark --redraw {folder / RECORD}`")
    else:
        draw_everything(record, folder)
