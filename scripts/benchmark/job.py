"""A whole run, from arguments to a written record."""

import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from dynattn.modeling.ops.dcmha.attention import default_implementation

from ..common.disk_errors import disk_errors_explained
from ..common.errors import UserError, refusal_of
from ..common.folder_lock import FolderLock
from ..common.measuring import copy_rate, gemm_rate
from .arguments import BenchmarkArguments
from .gpu_preset import SECONDS, check_preset, chosen_parts, forget_parts, run_preset
from .harness.accuracy import LARGEST_MULTIPLE, RMS_MULTIPLE
from .harness.comparison import OVER_BUDGET, run_case
from .harness.interface import Candidate, Case, Subject
from .harness.interruptions import Interruptions
from .harness.metadata import gpu_clocks, run_metadata
from .harness.process import DEVICE_LOST, END, GOES_ON, DeviceLostError, pinned_threads, run_workers
from .harness.settings import BenchmarkSettings, read_settings
from .harness.shapes import Shape
from .report.record import RECORD, TABLE, is_complete, make_output, read_earlier, save_record, write_record
from .report.tables import case_title, format_case
from .subjects.profile import PROFILE, add_profile, pass_rate
from .subjects.selection import Selection, select, shapes_of

LOCK = ".lock"
# What a run takes from the unfinished record with which it goes on.
CARRIED_ON = ("cases", "finished", "running", "interrupted")
# Settings that cases do not tell, and that all cases of a record share.
SHARED = ("seed", "rounds", "quick", "layers", "layer_types", "vocabulary")


def run_benchmark(argv: Sequence[str], arguments: BenchmarkArguments) -> int:
    """Measures what the arguments say, or the whole preset, in a pinned process.

    Returns:
        The exit status: 0 if nothing is wrong, 1 if something is, DEVICE_LOST if another process can go on.

    Raises:
        UserError: the arguments name what does not exist, or the output folder holds a record already.
    """
    torch.set_num_threads(pinned_threads())
    folder = Path(arguments.output)
    try:
        if arguments.preset is not None:
            return run_preset_in_workers(argv, arguments, folder)
        select(arguments, read_settings(arguments))
        make_output(folder, folder / RECORD, arguments)
        with disk_errors_explained(folder), FolderLock(folder / LOCK):
            return 0 if measure_to_folder(argv, arguments, folder) else 1
    except DeviceLostError as error:
        print(f"\n{error}; --resume goes on without it", flush=True)
        return DEVICE_LOST


def run_preset_in_workers(argv: Sequence[str], arguments: BenchmarkArguments, folder: Path) -> int:
    """Runs the preset: in this process if it is a worker, otherwise in workers; returns the exit status."""
    check_preset(arguments)
    if END not in os.environ:
        for part in chosen_parts(arguments):
            make_output(folder, folder / part.name / RECORD, arguments)
        with disk_errors_explained(folder), FolderLock(folder / LOCK):
            if arguments.overwrite:
                forget_parts(arguments, folder)
            return run_workers(argv, SECONDS)
    if GOES_ON in os.environ:
        arguments = replace(arguments, resume=True, overwrite=False)
    with disk_errors_explained(folder):
        is_right = run_preset(arguments, folder, partial(measure_to_folder, argv), float(os.environ[END]))
    return 0 if is_right else 1


def measure_to_folder(
    argv: Sequence[str], arguments: BenchmarkArguments, folder: Path, end: float | None = None
) -> bool:
    """Measures what the arguments say, beginning no case after `end`, and writes record, table and plots.

    Returns:
        Whether candidates could be measured, and nothing in the record is wrong.

    Raises:
        UserError: the arguments name what does not exist, or resume a record of other code, of another machine or with
            other candidates.
    """
    settings = replace(read_settings(arguments), end=end)
    selection, left_out = select(arguments, settings)
    folder.mkdir(exist_ok=True)
    shared = {name: getattr(settings, name) for name in SHARED}
    shared |= {"dtype": arguments.dtype, "implementations": arguments.implementations}
    metadata = run_metadata(argv, settings.device) | {"settings": shared, "left_out": left_out}
    record = read_earlier(folder, metadata) if arguments.resume else None
    if record is None or not is_complete(record) or lacks_cases(record, selection, settings):
        if record is not None:
            metadata |= carried_on(record, left_out)
        record = measure(selection, settings, metadata, partial(save_record, folder=folder))
    else:
        print(f"{folder / RECORD} is complete, so nothing is measured")
    write_record(record, folder)  # also a complete one, before whose table and plots a process may have been killed
    print(f"\nwritten: {folder}/{{{RECORD},{TABLE},*.png}}")
    rows = [row for case in record["cases"] for row in case["rows"]]
    is_measured = not rows or any("timing" in row for row in rows)  # there are no rows if the time was over before
    return is_measured and not any(is_fault(row) for row in rows)


def carried_on(record: dict[str, Any], left_out: Sequence[str]) -> dict[str, Any]:
    """What the metadata of a run take from the record with which it goes on: its cases, and how they were made.

    Args:
        left_out: the candidates that this run leaves out, whose subjects may be others than those of the record.
    """
    before = {f"{name}_before": [*record.get(f"{name}_before", []), record[name]] for name in ("started", "command")}
    every = list(dict.fromkeys([*record["left_out"], *left_out]))
    return {name: record[name] for name in CARRIED_ON if name in record} | before | {"left_out": every}


def measure(
    selection: Selection,
    settings: BenchmarkSettings,
    metadata: dict[str, Any],
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Runs all cases but those in `metadata["cases"]`, and returns the record.

    It calls `save` with the unfinished record after each case.
    """
    machine = measure_machine(settings)
    print(f"$ {shlex.join(metadata['command'])}")
    print(f"{metadata['hardware']}, {metadata['threads']} threads, {metadata['allocator']}")
    default = default_implementation(settings.device)
    print(f"by default heads are composed by {default.name}: {default.reason}")
    limits = {"rms": RMS_MULTIPLE, "largest": LARGEST_MULTIPLE}
    record = {"cases": [], "finished": [], **metadata, "error_multiples": limits, "machine": machine}
    record["cases_left_out"] = []
    interruptions = Interruptions(record, save, settings.budget)
    for subject, candidates, shape in selected_shapes(selection, settings):
        place = describe_place(subject, shape, settings)
        if place in record["finished"]:
            continue  # without its inputs, which take longer than many a case
        for case in cases_of(subject, shape, settings):
            measure_case(case, place | describe_case(case, subject), candidates, settings, interruptions)
        if not record["cases_left_out"]:
            record["finished"].append(place)
    return record | {"load_average_after": os.getloadavg(), "clocks_after": gpu_clocks(settings.device)}


def measure_case(
    case: Case,
    entry: dict[str, Any],
    candidates: Sequence[Candidate],
    settings: BenchmarkSettings,
    interruptions: Interruptions,
) -> None:
    """Adds a case to the record, unless it is there, or its name if time is over; `entry` is all of it but the rows."""
    record = interruptions.record
    if any(entry.items() <= before.items() for before in record["cases"]):
        return
    if settings.end is not None and time.monotonic() > settings.end:
        record["cases_left_out"].append(case_title(entry))
        return
    left_out = slow_with_fewer_tokens(entry, record["cases"])
    left_out |= interruptions.failures(entry, [one.name for one in candidates])
    with interruptions.noting():
        rows = run_case(case, candidates, settings, left_out, partial(interruptions.begin, entry))
    if entry["subject"] == PROFILE.name:
        add_profile(rows, case, settings, record["machine"])
    record["cases"].append(entry | {"rows": rows})
    interruptions.save(record)
    print(f"\n{format_case(record['cases'][-1], record['machine']['gemm_flops_per_second'])}", flush=True)


def selected_shapes(
    selection: Selection, settings: BenchmarkSettings
) -> Iterator[tuple[Subject, Sequence[Candidate], Shape]]:
    """Yields every selected shape with its subject and the candidates."""
    for subject, candidates in selection:
        for shape in shapes_of(subject, settings):
            yield subject, candidates, shape


def cases_of(subject: Subject, shape: Shape, settings: BenchmarkSettings) -> Iterator[Case]:
    """Yields the cases of a shape.

    Raises:
        UserError: the subject has no model of this shape.
    """
    try:
        yield from subject.cases(shape, settings)
    except (StrictDataclassError, ValueError) as error:
        raise UserError(f"{subject.name} cannot have the shape {shape}: {refusal_of(error)}") from error


def lacks_cases(record: dict[str, Any], selection: Selection, settings: BenchmarkSettings) -> bool:
    """Whether not all cases of one of the selected shapes are in a record."""
    places = (describe_place(subject, shape, settings) for subject, _, shape in selected_shapes(selection, settings))
    return any(place not in record.get("finished", []) for place in places)


def measure_machine(settings: BenchmarkSettings) -> dict[str, float]:
    """The rates of the machine to which results are compared."""
    return {
        "gemm_flops_per_second": gemm_rate(settings.dtype, settings.device),
        "copy_bytes_per_second": copy_rate(settings.device),
        "pass_elements_per_second": pass_rate(settings.device),
    }


def slow_with_fewer_tokens(case: dict[str, Any], before: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The candidates that were over the budget in an earlier case that differs only in a shorter length.

    Returns:
        The failures of their rows in this case, by name.
    """

    def without_length(one: dict[str, Any]) -> list[Any]:
        shape = {name: value for name, value in one["shape"].items() if name != "length"}
        return [shape, *(one[name] for name in ("subject", "passes", "batch_size", "dtype", "window", "note"))]

    alike = [one for one in before if without_length(one) == without_length(case)]
    shorter = [one for one in alike if one["shape"]["length"] < case["shape"]["length"]]
    rows = [row for one in shorter for row in one["rows"]]
    slow = (row["name"] for row in rows if row.get("failure", "").startswith(OVER_BUDGET))
    return dict.fromkeys(slow, f"{OVER_BUDGET} with fewer tokens already")


def describe_place(subject: Subject, shape: Shape, settings: BenchmarkSettings) -> dict[str, Any]:
    """What decides the cases of a shape, in JSON types."""
    return {
        "subject": subject.name,
        "shape": asdict(shape),
        "batch_size": settings.batch_size,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "window": settings.window,
    }


def describe_case(case: Case, subject: Subject) -> dict[str, Any]:
    """What a case has beside its place (see `describe_place`) and its rows, in JSON types."""
    return {
        "passes": case.passes,
        "window": case.window,
        "note": case.note,
        "floor_flops": case.flops(subject.function),
    }


def is_fault(row: dict[str, Any]) -> bool:
    """Whether a row makes the command fail: it is wrong, or ours and broken. With a ValueError ours merely declines."""
    if "failure" in row:
        return row["role"] == "ours" and not row["failure"].startswith(("ValueError", OVER_BUDGET))
    return not row["verdict"]["correct"]
