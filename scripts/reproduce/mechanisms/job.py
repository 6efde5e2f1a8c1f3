"""The whole study: its missing runs, then record, table and plots of all finished ones."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ...common.atomic_file import write_json
from ...common.errors import UserError
from ...compare.study_folder import RECORD, claim, draw
from .arguments import QUICK_STEPS, MechanismsArguments
from .arms import ARMS, FIRST
from .figures import draw_survival
from .plan import PRESETS, Cell, Preset, Run, measured_runs, tuning_runs
from .record import make_record
from .table import table
from .training import definition, run_one

PLOT = "survival.png"
Result = dict[str, Any]


def run_study(arguments: MechanismsArguments) -> str:
    """Trains what is missing and reports what is finished; returns the table and the names of the files.

    Raises:
        UserError: a task or an arm does not exist, the folder holds another study, or no measured run is finished.
    """
    study = Study(arguments)
    missing = 0 if arguments.redraw else study.train()
    rest = f"\n{missing} runs are left; the same command goes on with them" if missing else ""
    return f"{study.report()}{rest}"


class Study:
    """The runs of a study and their files."""

    def __init__(self, arguments: MechanismsArguments) -> None:
        self.arguments, self.output = arguments, Path(arguments.output)
        preset = PRESETS[arguments.preset]
        self.preset: Preset = replace(preset, steps=QUICK_STEPS) if arguments.quick else preset
        self.tasks = _chosen("task", arguments.tasks, self.preset.tasks)
        self.arms = _chosen("arm", arguments.arms, ARMS)
        layers, heads = arguments.layers or [self.preset.size.layers], arguments.heads or [self.preset.size.heads]
        self.cells: list[Cell] = list(product(self.tasks, layers, heads))
        self.device = "cuda" if arguments.preset == "gpu" and torch.cuda.is_available() else "cpu"
        self.deadline = time.monotonic() + (arguments.max_seconds or float("inf"))

    def train(self) -> int:
        """Makes the runs that are missing; returns how many are left.

        The arms of the question come first, and of both groups those runs that learning rates are chosen by.
        """
        claim(self.output, self._definition(), "study of mechanisms")
        groups = [[arm for arm in self.arms if (arm in FIRST) is first] for first in (True, False)]
        return sum(self._make(self._tuning(arms)) or self._make(self._measured(arms)) for arms in groups)

    def _definition(self) -> dict[str, Any]:
        """What all runs of a folder have in common, so that runs of other sizes are not mixed with them."""
        return {"preset": self.arguments.preset, **asdict(replace(self.preset, tasks={}))}

    def report(self) -> str:
        """Writes record, table and plot; returns the table and the names of the files."""
        runs = [self._read(run) for run in self._measured(self.arms) if self._is_finished(run)]
        if not runs:
            raise UserError(f"{self.output} holds no measured run yet; run the study without --redraw, or longer")
        write_json(self.output / RECORD, make_record(runs, self._settings()), indent=1)
        return draw(self.output, table, draw_survival, PLOT)

    def _settings(self) -> dict[str, Any]:
        chosen = {"preset": self.arguments.preset, "steps": self.preset.steps, "batch": self.preset.batch}
        names = ("seeds", "tuning_seed", "learning_rates")
        rates = {" ".join(map(str, (*cell, arm))): rate for (cell, arm), rate in self._rates(self.arms).items()}
        return {**chosen, **{name: getattr(self.arguments, name) for name in names}, "chosen": rates}

    def _tuning(self, arms: Sequence[str]) -> list[Run]:
        return list(tuning_runs(self.cells, arms, self.arguments.tuning_seed, self.arguments.learning_rates))

    def _measured(self, arms: Sequence[str]) -> list[Run]:
        return list(measured_runs(self.cells, arms, self.arguments.seeds, self._rates(arms)))

    def _rates(self, arms: Sequence[str]) -> dict[tuple[Cell, str], float]:
        """The best learning rate of each cell and arm; the first of the list until all have been tried."""
        rates = dict.fromkeys(product(self.cells, arms), self.arguments.learning_rates[0])
        best: dict[tuple[Cell, str], tuple[float, float]] = {}
        for run in self._tuning(arms):
            key = (run.cell, run.arm)
            if self._is_finished(run) and (merit := _merit(self._read(run))) > best.get(key, (-1.0, 0.0)):
                best[key], rates[key] = merit, run.learning_rate
        return rates

    def _make(self, runs: Iterable[Run]) -> int:
        """Makes the runs that have no file, `workers` at a time, until the deadline; returns how many are left."""
        missing = [run for run in runs if not self._is_finished(run)]
        workers = self.arguments.workers
        with _pool(workers) as results_of:
            for first in range(0, len(missing), workers):
                if time.monotonic() > self.deadline:
                    return len(missing) - first
                batch = missing[first : first + workers]
                results = results_of(run_one, batch, [self.preset] * len(batch), [self.device] * len(batch))
                for run, result in zip(batch, results, strict=True):
                    self._keep(run, result)
        return 0

    def _keep(self, run: Run, result: Result) -> None:
        file = self._file(run)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, result)
        solved = result["solved_at"]
        verdict = f"solved after {solved:,} sequences" if solved else f"accuracy {result['accuracy']:.3f}"
        print(f"{run.task}: {run.arm}, seed {run.seed}, {run.learning_rate:g}: {verdict}", flush=True)

    def _file(self, run: Run) -> Path:
        return self.output / "runs" / run.file_name

    def _is_finished(self, run: Run) -> bool:
        """Whether the run has its file.

        Raises:
            UserError: its task or its attention was another one when it was made.
        """
        if not self._file(run).exists():
            return False
        if self._read(run)["definition"] != definition(run, self.preset):
            raise UserError(
                f"{self._file(run)} is of another version of {run.task} or {run.arm}; give another --output, or remove "
                "the file to repeat the run"
            )
        return True

    def _read(self, run: Run) -> Result:
        return json.loads(self._file(run).read_text(encoding="utf-8"))


def _merit(result: Result) -> tuple[float, float]:
    """What makes one learning rate better than another: to be right in the end, and then to be so early."""
    return result["accuracy"] if result["solved_at"] is None else 1.0, -(result["solved_at"] or 0)


def _chosen(noun: str, names: Sequence[str] | None, known: Mapping[str, Any]) -> list[str]:
    if unknown := sorted(set(names or ()) - set(known)):
        raise UserError(f"{noun}s {unknown} do not exist; choose from {', '.join(known)}")
    return list(names or known)


@contextmanager
def _pool(workers: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """Something like `map` that uses so many processes, each with one thread; a single one is this process."""
    if workers == 1:
        _one_thread()
        yield map
        return
    # Processes are started afresh: one that is forked hangs in libraries whose threads it does not have.
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_one_thread) as pool:
        yield pool.map


def _one_thread() -> None:
    torch.set_num_threads(1)
