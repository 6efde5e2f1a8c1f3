"""The whole study: its missing runs, then record, table and plot."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ...common.arguments import command_line
from ...common.atomic_file import write_json
from ...common.environment import hardware, versions
from ...compare.study_folder import RECORD, claim, draw
from .arguments import PositionsArguments
from .figures import draw_lengths
from .record import make_record, table, trained_match
from .training import MODEL, Run, train

PLOT = "lengths.png"
# Learning rates are chosen on this cell.
TUNING_TASK, TUNING_SCHEME = "copy-many", "rope"
COMMON = ("steps", "layers", "longest")


def run_study(arguments: PositionsArguments) -> str:
    """Trains what is missing, then writes record, table and plot; returns the table and the names of the files.

    Raises:
        UserError: the folder holds a study with other settings, or there is no record to redraw.
    """
    output = Path(str(arguments.output))
    if not arguments.redraw:
        claim(output, {name: getattr(arguments, name) for name in COMMON}, "study of positions")
        rates, tuning = choose_rates(arguments, output)
        runs = [measure(run, output) for run in plan(arguments, rates)]
        settings = {name: getattr(arguments, name) for name in (*COMMON, "tasks", "schemes", "wide", "seeds")}
        settings |= {"learning_rates": arguments.learning_rates, "tuning": tuning, "chosen": rates, "model": MODEL}
        measured: dict[str, Any] = {"hardware": hardware(torch.device("cpu")), "versions": versions()}
        measured["threads"] = torch.get_num_threads()
        record = {"command": command_of(arguments), **measured, **make_record(settings, runs)}
        write_json(output / RECORD, record, indent=1)
    return draw(output, table, draw_lengths, PLOT)


def plan(arguments: PositionsArguments, rates: dict[str, float]) -> Iterator[Run]:
    """The measured runs. A seed is finished in all cells before the next one begins."""
    shared = {name: getattr(arguments, name) for name in COMMON}
    for seed in arguments.seeds:
        for task in arguments.tasks:
            for scheme in arguments.schemes:
                for composition in ("off", "on", *(["wide"] if scheme in arguments.wide else [])):
                    rate = rates["on" if composition == "on" else "off"]
                    yield Run(task, scheme, composition, seed, rate, **shared)


def choose_rates(arguments: PositionsArguments, output: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """The learning rate of plain and of composed models, and the numbers from which they are chosen.

    The best is that with the most right answers on trained lengths. A single rate is taken without a run.
    """
    if len(arguments.learning_rates) == 1:
        return dict.fromkeys(("off", "on"), arguments.learning_rates[0]), {}
    shared = {name: getattr(arguments, name) for name in COMMON}
    found: dict[str, Any] = {"seed": arguments.tuning_seed, "task": TUNING_TASK, "scheme": TUNING_SCHEME}
    for composition in ("off", "on"):
        runs = [
            Run(TUNING_TASK, TUNING_SCHEME, composition, arguments.tuning_seed, rate, **shared)
            for rate in arguments.learning_rates
        ]
        found[composition] = {f"{run.learning_rate:g}": trained_match(measure(run, output)) for run in runs}
    return {name: float(max(found[name], key=found[name].get)) for name in ("off", "on")}, found


def measure(run: Run, output: Path) -> dict[str, Any]:
    """The result of a run, from its file if it was made before."""
    path = output / "runs" / run.name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        result = train(run)
        write_json(path, result)
        print(f"{run.name}: trained {trained_match(result):.3f}, {result['seconds']:.0f} s", flush=True)
    return json.loads(path.read_text(encoding="utf-8"))


def command_of(arguments: PositionsArguments) -> str:
    """The command line that repeats the study, wherever its folder is."""
    names = (*COMMON, "tasks", "schemes", "wide", "seeds", "tuning_seed", "learning_rates")
    chosen = ("quick",) if arguments.quick else names
    return command_line("reproduce positions", {name: getattr(arguments, name) for name in chosen})
