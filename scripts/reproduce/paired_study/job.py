"""A study of arms from end to end: its missing runs, then record, table and plot of all finished ones."""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from ...common.arguments import command_line
from ...common.errors import UserError
from ...compare.study_folder import claim, draw, write_record
from ..study_runs import Result, StudyRuns, chosen
from .arguments import PairedStudyArguments
from .figures import draw_arms
from .record import make_record, table

PLOT = "arms.png"


@dataclass(frozen=True)
class Run:
    """One model of a study.

    Attributes:
        tuning: whether it only serves to choose a learning rate.
        quick: whether sizes are the small ones.
    """

    task: str
    arm: str
    seed: int
    learning_rate: float
    tuning: bool
    quick: bool

    @property
    def cell(self) -> tuple[str, str]:
        """Identifies the runs that share a learning rate."""
        return self.task, self.arm

    @property
    def file_name(self) -> str:
        purpose = "-tuning" if self.tuning else ""  # a task may score the two on different data
        return f"{self.task}/{self.arm}-seed-{self.seed}-rate-{self.learning_rate:g}{purpose}.json"


@dataclass(frozen=True)
class Metric:
    """What a task measures.

    Attributes:
        label: its name in table and plot.
        digits: behind the point.
    """

    name: str
    label: str
    better: Literal["higher", "lower"]
    digits: int = 3


@dataclass(frozen=True)
class Task:
    """What a task of a study measures.

    Attributes:
        metrics: the first is the one that the plot shows.
        chosen_by: the metric by which learning rates are chosen.
        arms: those that it asks about; None for all.
        package: what its data come with, by the name of its module, if it is not part of every installation.
    """

    label: str
    metrics: tuple[Metric, ...]
    chosen_by: Metric
    arms: tuple[str, ...] | None = None
    package: str | None = None


@dataclass(frozen=True)
class Study:
    """What one study is.

    Attributes:
        name: as in `dynattn reproduce NAME`.
        arms: labels by name.
        contrasts: pairs of arms; the first minus the second is reported, paired by seed.
        run_one: makes a `Run`: a function of a module, which returns the parameters, FLOPs and seconds of a model, and
            `metrics`, numbers by name.
        sizes: by whether the study is the quick one, then by task: dataclasses that say how large everything is. Runs
            of other sizes are not mixed.
        notes: how to read the table.
    """

    name: str
    tasks: Mapping[str, Task]
    arms: Mapping[str, str]
    contrasts: tuple[tuple[str, str], ...]
    run_one: Callable[[Run], Result]
    sizes: Mapping[bool, Mapping[str, Any]]
    notes: str


def run_study(study: Study, arguments: PairedStudyArguments) -> str:
    """Trains what is missing and reports what is finished; returns the table and the names of the files.

    Raises:
        UserError: a task or an arm does not exist, data of a task are missing, the folder holds another study, or no
            measured run is finished.
    """
    output = Path(arguments.output or f"runs/{study.name}")
    tasks = chosen("task", arguments.tasks, study.tasks)
    arms = chosen("arm", arguments.arms, study.arms)
    if not arguments.redraw:
        check_packages(study, tasks)
    if not arguments.redraw or output.exists():
        sizes = {task: asdict(sizes) for task, sizes in study.sizes[arguments.quick].items()}
        claim(output, {"study": study.name, "sizes": sizes}, f"study {study.name}")
    runs = StudyRuns(
        output / "runs", study.run_one, partial(_describe, study), arguments.workers, arguments.max_seconds
    )
    plan = Plan(study, arguments, tasks, arms, runs)
    if not arguments.redraw and not runs.make(plan.tuning()):
        runs.make(plan.measured())
    results, missing = runs.results(plan.measured()), plan.missing()
    if not results:
        raise UserError(f"{output} holds no measured run yet; run the study without --redraw, or longer")
    write_record(output, make_record(description(study, tasks, arms), plan.settings(), results))
    rest = f"\n{missing} runs are left; the same command goes on with them" if missing else ""
    return draw(output, table, draw_arms, PLOT) + rest


def check_packages(study: Study, tasks: list[str]) -> None:
    """Raises UserError if a package is missing that data of a task come with: before the first run, not hours later."""
    for task in tasks:
        package = study.tasks[task].package
        if package is not None and find_spec(package) is None:
            raise UserError(
                f"the data of task {task!r} come with {package!r}, which is not installed; pip install "
                "'dynattn[studies]', or choose others with --tasks"
            )


@dataclass(frozen=True)
class Plan:
    """The runs of a study in the order in which they are made."""

    study: Study
    arguments: PairedStudyArguments
    tasks: list[str]
    arms: list[str]
    runs: StudyRuns

    def tuning(self) -> list[Run]:
        """The runs by which each arm gets its learning rate; none if there is nothing to choose."""
        rates, seed = self.arguments.rates, self.arguments.tuning_seed
        if len(rates) == 1:
            return []
        quick = self.arguments.quick
        return [Run(*cell, seed, rate, tuning=True, quick=quick) for cell in self._cells() for rate in rates]

    def measured(self) -> Iterator[Run]:
        """The runs that count: a seed in all arms of all tasks before the next, so that unfinished studies are fair."""
        rates = self._rates()
        for seed in self.arguments.seeds:
            for cell in [cell for cell in self._cells() if cell in rates]:
                yield Run(*cell, seed, rates[cell], tuning=False, quick=self.arguments.quick)

    def missing(self) -> int:
        """How many runs are not finished, those included whose learning rate is not chosen yet."""
        unknown = (len(self._cells()) - len(self._rates())) * len(self.arguments.seeds)
        return unknown + sum(not self.runs.has(run) for run in (*self.tuning(), *self.measured()))

    def settings(self) -> dict[str, Any]:
        """What the record says about how the study was run."""
        settings = {name: getattr(self.arguments, name) for name in ("seeds", "tuning_seed", "quick")}
        settings |= {"learning_rates": self.arguments.rates, "tuning": self.choices()}
        return settings | {"command": command_of(self.study, self.arguments), "unfinished_runs": self.missing()}

    def choices(self) -> dict[str, dict[str, dict[str, float]]]:
        """What learning rates were chosen by: numbers by task, arm and rate."""
        found: dict[str, dict[str, dict[str, float]]] = {}
        for run in self.tuning():
            if self.runs.has(run):
                value = self.runs.read(run)["metrics"][self.study.tasks[run.task].chosen_by.name]
                found.setdefault(run.task, {}).setdefault(run.arm, {})[f"{run.learning_rate:g}"] = value
        return found

    def _cells(self) -> list[tuple[str, str]]:
        """The arms of each task."""
        known = self.study.tasks
        return [(task, arm) for task in self.tasks for arm in self.arms if arm in (known[task].arms or self.arms)]

    def _rates(self) -> dict[Hashable, float]:
        """The learning rate of each cell in which all have been tried, or the only one."""
        if len(self.arguments.rates) == 1:
            return dict.fromkeys(self._cells(), self.arguments.rates[0])
        return self.runs.best_rates(self.tuning(), partial(merit, self.study))


def merit(study: Study, result: Result) -> float:
    """What makes one learning rate of an arm better than another."""
    metric = study.tasks[result["run"]["task"]].chosen_by
    value = result["metrics"][metric.name]
    if value is None or math.isnan(value):  # the run diverged
        return -math.inf
    return value if metric.better == "higher" else -value


def description(study: Study, tasks: list[str], arms: list[str]) -> dict[str, Any]:
    """What the record says about the study itself."""
    return {
        "study": study.name,
        "tasks": {name: asdict(study.tasks[name]) for name in tasks},
        "arms": {name: study.arms[name] for name in arms},
        "contrasts": [pair for pair in study.contrasts if set(pair) <= set(arms)],
        "notes": study.notes,
    }


def command_of(study: Study, arguments: PairedStudyArguments) -> str:
    """The command line that repeats the study, wherever its folder is."""
    names = ("quick", "tasks", "arms", "seeds", "tuning_seed", "learning_rates")
    return command_line(f"reproduce {study.name}", {name: getattr(arguments, name) for name in names})


def _describe(study: Study, result: Result) -> str:
    metrics = study.tasks[result["run"]["task"]].metrics
    numbers = (f"{metric.label} {result['metrics'][metric.name]:.{metric.digits}f}" for metric in metrics)
    return f"{', '.join(numbers)}, {result['cpu_seconds']:.0f} s"
