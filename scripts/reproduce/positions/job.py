"""The whole study: its missing runs, then record, table and plot."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...common.arguments import command_line
from ...common.errors import UserError
from ...compare.study_folder import claim, draw, write_record
from ..study_runs import Result, StudyRuns
from .arguments import PositionsArguments
from .figures import draw_lengths
from .record import make_record, table, trained_match
from .training import MODEL, Run, definition, train

PLOT = "lengths.png"
# Learning rates are chosen on this cell.
TUNING_TASK, TUNING_SCHEME = "copy-many", "rope"
COMMON = ("steps", "layers", "longest")


def run_study(arguments: PositionsArguments) -> str:
    """Trains what is missing, then writes record, table and plot; returns the table and the names of the files.

    Raises:
        UserError: the folder holds a study with other settings, there is no record to redraw, or time was over before
            two seeds were finished.
    """
    output = Path(str(arguments.output))
    if arguments.redraw:
        return draw(output, table, draw_lengths, PLOT)
    claim(output, {name: getattr(arguments, name) for name in COMMON}, "study of positions")
    runs = StudyRuns(output / "runs", train, _describe, arguments.workers, arguments.max_seconds, definition)
    left = runs.make(tuning_runs(arguments))
    left = left or runs.make(measured_runs(arguments, chosen_rates(arguments, runs), arguments.seeds))
    rest = f"{left} runs are left; the same command goes on with them" if left else ""
    seeds = finished_seeds(arguments, runs)
    if len(seeds) < 2:
        raise UserError(f"{rest}, and two finished seeds make a record")
    write_record(output, record_of(arguments, runs, seeds))
    return f"{draw(output, table, draw_lengths, PLOT)}\n{rest}".rstrip()


def tuning_runs(arguments: PositionsArguments) -> list[Run]:
    """The runs by which plain and composed models get their learning rates; none if there is nothing to choose."""
    shared = {name: getattr(arguments, name) for name in COMMON}
    rates = arguments.learning_rates if len(arguments.learning_rates) > 1 else []
    return [
        Run(TUNING_TASK, TUNING_SCHEME, composition, arguments.tuning_seed, rate, **shared)
        for composition in ("off", "on")
        for rate in rates
    ]


def chosen_rates(arguments: PositionsArguments, runs: StudyRuns) -> dict[str, float]:
    """The learning rate of plain and of composed models: that with the most right answers on trained lengths."""
    only = dict.fromkeys(("off", "on"), arguments.learning_rates[0])
    return only | {str(cell): rate for cell, rate in runs.best_rates(tuning_runs(arguments), trained_match).items()}


def measured_runs(arguments: PositionsArguments, rates: Mapping[str, float], seeds: list[int]) -> Iterator[Run]:
    """The runs that count. A seed is finished in all cells before the next one begins."""
    shared = {name: getattr(arguments, name) for name in COMMON}
    for seed in seeds:
        for task in arguments.tasks:
            for scheme in arguments.schemes:
                for composition in ("off", "on", *(["wide"] if scheme in arguments.wide else [])):
                    rate = rates["on" if composition == "on" else "off"]
                    yield Run(task, scheme, composition, seed, rate, **shared)


def finished_seeds(arguments: PositionsArguments, runs: StudyRuns) -> list[int]:
    """Those that every cell has, so that cells can be compared."""
    if not all(map(runs.has, tuning_runs(arguments))):
        return []
    rates = chosen_rates(arguments, runs)
    return [seed for seed in arguments.seeds if all(map(runs.has, measured_runs(arguments, rates, [seed])))]


def record_of(arguments: PositionsArguments, runs: StudyRuns, seeds: list[int]) -> dict[str, Any]:
    """The record of the finished seeds, with what learning rates were chosen by."""
    rates = chosen_rates(arguments, runs)
    settings = {name: getattr(arguments, name) for name in (*COMMON, "tasks", "schemes", "wide", "learning_rates")}
    settings |= {"seeds": seeds, "tuning": tuning_of(arguments, runs), "chosen": rates, "model": MODEL}
    results = runs.results(measured_runs(arguments, rates, seeds))
    # `StudyRuns` gives every run one thread.
    return {"command": command_of(arguments), "threads": 1, **make_record(settings, results)}


def tuning_of(arguments: PositionsArguments, runs: StudyRuns) -> dict[str, Any]:
    """The numbers from which learning rates were chosen, by composition and rate; empty if there was no choice."""
    found: dict[str, Any] = {}
    for run in tuning_runs(arguments):
        found.setdefault(run.cell, {})[f"{run.learning_rate:g}"] = trained_match(runs.read(run))
    where = {"seed": arguments.tuning_seed, "task": TUNING_TASK, "scheme": TUNING_SCHEME}
    return where | found if found else {}


def _describe(result: Result) -> str:
    return f"trained {trained_match(result):.3f}, {result['seconds']:.0f} s"


def command_of(arguments: PositionsArguments) -> str:
    """The command line that repeats the study, wherever its folder is."""
    names = (*COMMON, "tasks", "schemes", "wide", "seeds", "tuning_seed", "learning_rates")
    chosen = ("quick",) if arguments.quick else names
    return command_line("reproduce positions", {name: getattr(arguments, name) for name in chosen})
