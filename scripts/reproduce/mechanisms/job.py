"""The whole study: its missing runs, then record, table and plots of all finished ones."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ...common.atomic_file import read_json
from ...common.errors import UserError
from ...compare.study_folder import RECORD, claim, draw, write_record
from ..study_runs import Result, StudyRuns, chosen
from .arguments import QUESTION, QUICK_STEPS, MechanismsArguments
from .arms import ARMS, FIRST
from .figures import draw_solved
from .plan import PRESETS, Cell, Preset, Run
from .record import Record, make_record, with_tests
from .table import table
from .training import definition, run_one

PLOT = "solved.png"


def run_study(arguments: MechanismsArguments) -> str:
    """Trains what is missing and reports what is finished; returns the table and the names of the files.

    Raises:
        UserError: a task or an arm does not exist, the folder holds another study, or no measured run is finished.
    """
    study = Study(arguments)
    if study.runs.folder.exists() or not arguments.redraw:  # a record without its runs can be drawn as well
        study.claim()
    missing = 0 if arguments.redraw else study.train()
    rest = f"\n{missing} runs are left; the same command goes on with them" if missing else ""
    write_record(study.output, study.record())
    return draw(study.output, table, draw_solved, PLOT) + rest


class Study:
    """The runs of a study and their files."""

    def __init__(self, arguments: MechanismsArguments) -> None:
        self.arguments, self.output = arguments, Path(arguments.output)
        preset = PRESETS[arguments.preset]
        self.preset: Preset = replace(preset, steps=QUICK_STEPS) if arguments.quick else preset
        tasks = chosen("task", arguments.tasks, self.preset.tasks)
        # The arms are checked before --quick replaces them, so that no mistyped one goes unnoticed.
        arms = chosen("arm", arguments.arms, ARMS)
        if arguments.quick:
            arms = list(QUESTION)
        size = self.preset.size
        layers, heads = (dict.fromkeys(x) for x in (arguments.layers or [size.layers], arguments.heads or [size.heads]))
        places = product(tasks, layers, heads)
        cells: list[Cell] = list(product(places, arms))
        refusals = {(arm, heads): ARMS[arm].refusal(replace(size, heads=heads)) for (_, _, heads), arm in cells}
        self.refused = {cell: reason for cell, reason in refusals.items() if reason is not None}
        self.cells = [(place, arm) for place, arm in cells if (arm, place[2]) not in self.refused]
        self.runs = StudyRuns(
            self.output / "runs",
            partial(run_one, preset=self.preset, device=device_of(arguments)),
            _describe,
            arguments.workers,
            arguments.max_seconds,
            partial(definition, preset=self.preset),
        )

    def claim(self) -> None:
        """Reserves the folder; raises UserError if it holds runs of another preset or length, or something else."""
        shared = {"preset": self.arguments.preset, **asdict(replace(self.preset, tasks={}))}
        claim(self.output, shared, "study of mechanisms")

    def train(self) -> int:
        """Makes the runs that are missing; returns how many are left.

        The arms of the question come first, and of both groups those runs that learning rates are chosen by.
        """
        for (arm, heads), reason in self.refused.items():
            print(f"{arm} is left out with {heads} heads: {reason}", flush=True)
        groups = [[cell for cell in self.cells if (cell[1] in FIRST) is first] for first in (True, False)]
        return sum(self.runs.make(self._tuning(cells)) or self.runs.make(self._measured(cells)) for cells in groups)

    def record(self) -> Record:
        """The record of the finished runs. In a folder with a record but no runs: that record, with new tests."""
        results, stored = self.runs.results(self._measured(self.cells)), self.output / RECORD
        if results:
            return make_record(results, self._settings())
        if self.arguments.redraw and stored.exists() and not self.runs.folder.exists():
            return with_tests(read_json(stored, "give another --output"))
        raise UserError(f"{self.output} holds no measured run yet; run the study without --redraw, or longer")

    def _settings(self) -> dict[str, Any]:
        settings = {"preset": self.arguments.preset, "steps": self.preset.steps, "batch": self.preset.batch}
        names = ("seeds", "tuning_seed", "learning_rates")
        finished = [cell for cell in self.cells if self.runs.results(self._measured([cell]))]
        rates = {" ".join(map(str, (*place, arm))): rate for (place, arm), rate in self._rates(finished).items()}
        settings |= {name: getattr(self.arguments, name) for name in names}
        refused = [{"arm": arm, "heads": heads, "reason": why} for (arm, heads), why in self.refused.items()]
        return {**settings, "refused": refused, "chosen": rates}

    def _tuning(self, cells: Sequence[Cell]) -> list[Run]:
        """The runs by which each arm gets its learning rate at a place; none if there is nothing to choose."""
        seed, rates = self.arguments.tuning_seed, self.arguments.learning_rates
        return [_run(cell, seed, rate) for cell in cells for rate in rates] if len(rates) > 1 else []

    def _measured(self, cells: Sequence[Cell]) -> list[Run]:
        """The runs that count, all arms of a seed before the next seed, so that an unfinished study is balanced."""
        rates = self._rates(cells)  # a cell without a rate has no runs yet
        return [_run(cell, seed, rates[cell]) for seed in self.arguments.seeds for cell in cells if cell in rates]

    def _rates(self, cells: Sequence[Cell]) -> dict[Cell, float]:
        """The best learning rate of each arm at each place where all have been tried, or the only one."""
        if len(self.arguments.learning_rates) == 1:
            return dict.fromkeys(cells, self.arguments.learning_rates[0])
        found: dict[Any, float] = self.runs.best_rates(self._tuning(cells), _merit)
        return found


def device_of(arguments: MechanismsArguments) -> str:
    """Where models are trained: the GPU preset's on a GPU if there is one."""
    return "cuda" if arguments.preset == "gpu" and torch.cuda.is_available() else "cpu"


def _run(cell: Cell, seed: int, rate: float) -> Run:
    (task, layers, heads), arm = cell
    return Run(task, arm, layers, heads, seed, rate)


def _describe(result: Result) -> str:
    solved = result["solved_at"]
    return f"solved after {solved:,} sequences" if solved else f"accuracy {result['accuracy']:.3f}"


def _merit(result: Result) -> tuple[float, float]:
    """What makes one learning rate better than another: to be right in the end, and then to be so early."""
    return result["accuracy"] if result["solved_at"] is None else 1.0, -(result["solved_at"] or 0)
