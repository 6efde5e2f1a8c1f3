"""Makes runs that differ in one number, one after the other or several at a time: `--sweep lr=1e-4:1e-2:7`.

Each run has its folder below `output`. After an interruption the same command continues: it resumes runs that had
begun, and does not repeat those that have ended or diverged.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..common.atomic_file import read_json, write_json
from ..common.errors import UserError
from ..common.launcher import is_only_process
from .arguments import PretrainArguments
from .guard import DivergedError
from .job import pretrain
from .options.sweep import Sweep
from .outputs.run_folder import RunFolder
from .same_texts import check_same_texts
from .sweep_processes import SweepTask, run_tasks

# Settings that may differ between the commands that make one sweep.
FREE_SETTINGS = (
    "max_seconds",
    "resume",
    "keep_checkpoints",
    "save_every",
    "log_every",
    "engine",
    "shard_processes",
    "sweep_workers",
)


@dataclass(frozen=True)
class Outcome:
    """How one run ended.

    Attributes:
        value: the number that is different in each run.
        loss: the validation loss after the last update; None if the run diverged.
        note: why it diverged.
    """

    value: float
    loss: float | None
    note: str = ""


def run_sweep(arguments: PretrainArguments) -> str:
    """Makes all runs, and writes `sweep.json` and `sweep.png` beside them.

    Returns:
        For the terminal: a table of the losses, and the line with the best value for a recipe.

    Raises:
        UserError: `output` holds a sweep with other settings or of other texts, a run is refused, or torchrun has
            started several processes.
        StoppedError: a signal or `max_seconds` ended the sweep; the same command continues it.
    """
    if not is_only_process():
        raise UserError(
            "a sweep makes one run after the other, and torchrun has started several processes; start it without "
            "torchrun (--sweep_workers makes several runs at a time)"
        )
    sweep, folder, started = Sweep.parse(arguments.sweep or ""), Path(arguments.output), time.monotonic()
    record = folder / "sweep.json"
    settings = {name: value for name, value in asdict(arguments).items() if name not in FREE_SETTINGS}
    known = read_outcomes(record, settings)
    check_same_texts(arguments.of_sweep(sweep.name, value) for value in sweep.values)
    left = [value for value in sweep.values if value not in known]
    runs = {value: partial(run_one, arguments, sweep.name, value, started) for value in left}
    for outcome in make_runs(runs, arguments):
        known[outcome.value] = outcome
        write_json(record, {"settings": settings, "runs": [asdict(one) for one in known.values()]}, indent=1)
    outcomes = [known[value] for value in sweep.values]
    draw(sweep, outcomes, folder / "sweep.png")
    return "\n".join([*table(sweep, outcomes), f"plot: {folder / 'sweep.png'}", recipe_line(sweep, outcomes)])


def make_runs(runs: Mapping[float, Callable[[], Outcome]], arguments: PretrainArguments) -> Iterator[Outcome]:
    """Makes the runs, with several `sweep_workers` in processes of their own, and yields each outcome as a run ends.

    Raises:
        UserError: a run is refused.
        StoppedError: a signal or `max_seconds` ended one of them.
    """
    if arguments.sweep_workers == 1:
        yield from (run() for run in runs.values())
        return
    folder = Path(arguments.output)
    tasks = {value: SweepTask(run, folder / f"{value:g}.log") for value, run in runs.items()}
    for value, outcome in run_tasks(tasks, arguments.sweep_workers):
        print(f"{value:g}: {'diverged' if outcome.loss is None else f'validation loss {outcome.loss:.4f}'}", flush=True)
        yield outcome


def run_one(arguments: PretrainArguments, name: str, value: float, started: float) -> Outcome:
    """Makes or resumes one run, or reads its result if it has ended.

    Args:
        started: when the sweep began; the run may take what is then left of `max_seconds`.
    """
    asked, limit = arguments.of_sweep(name, value), arguments.max_seconds
    run = RunFolder(Path(asked.output))
    if run.model.exists():  # appears last
        stored = read_json(run.result, f"remove {run.path} to repeat the run")
        check_same_options(stored["arguments"], asked)
        return Outcome(value, stored["validation_loss"])
    shared = None if arguments.streaming else str(Path(arguments.output) / "token_cache")
    left = None if limit is None else max(1.0, limit - (time.monotonic() - started))
    print(f"\n{name}: {value:g}", flush=True)
    try:
        result = pretrain(replace(asked, token_cache=asked.token_cache or shared, max_seconds=left))
    except DivergedError as error:
        return Outcome(value, None, str(error))
    return Outcome(value, result.validation_loss)


def check_same_options(trained: dict[str, Any], asked: PretrainArguments) -> None:
    """Raises UserError if a run that has ended was trained with other options than the sweep asks for now."""
    free = {*FREE_SETTINGS, "output", "token_cache", "sweep"}
    now = json.loads(json.dumps(asdict(asked), default=str))
    for option, value in now.items():
        before = trained.get(option, value)  # earlier versions lack options of later ones
        if option not in free and before != value:
            raise UserError(
                f"{asked.output} was trained with {option}={before}, and not {value}; remove it, or give another output"
            )


def read_outcomes(record: Path, settings: dict[str, Any]) -> dict[float, Outcome]:
    """The outcomes that an earlier command has recorded, by value.

    Raises:
        UserError: the earlier command had other settings, or its record is damaged.
    """
    if not record.exists():
        return {}
    stored = read_json(record, "remove it; runs that have ended are kept")
    if not isinstance(stored.get("settings"), dict) or not isinstance(stored.get("runs"), list):
        raise UserError(f"{record} is no record of a sweep; give another output")
    now = json.loads(json.dumps(settings, default=str))
    before = {**now, **stored["settings"]}  # earlier versions lack options of later ones
    if changed := sorted(name for name in now if before[name] != now[name]):
        name = changed[0]
        raise UserError(
            f"{record.parent} holds a sweep with other settings ({name} was {before[name]}, is {now[name]}); change "
            "them back, or give another output"
        )
    return {run["value"]: Outcome(**run) for run in stored["runs"]}


def best_of(outcomes: list[Outcome]) -> Outcome:
    """The run with the lowest loss.

    Raises:
        UserError: all have diverged.
    """
    best = min(outcomes, key=lambda outcome: math.inf if outcome.loss is None else outcome.loss)
    if best.loss is None:
        raise UserError(f"all {len(outcomes)} runs of the sweep have diverged: {best.note}; sweep other values")
    return best


def table(sweep: Sweep, outcomes: list[Outcome]) -> list[str]:
    """One line for each run."""
    lines = [f"{sweep.name:>16}  validation loss"]
    return lines + [
        f"{outcome.value:>16g}  {'diverged' if outcome.loss is None else f'{outcome.loss:.4f}'}" for outcome in outcomes
    ]


def recipe_line(sweep: Sweep, outcomes: list[Outcome]) -> str:
    """The line with the best value for a recipe, and a warning if the best value is at an end of the sweep."""
    best, values = best_of(outcomes), sweep.values
    line = (
        f"{sweep.name}: {best.value:g}  # validation loss {best.loss:.4f}, best of {len(values)} from {values[0]:g} to "
        f"{values[-1]:g}"
    )
    at_end = best.value in (values[0], values[-1])
    return f"{line}\nthe best value is at an end of the sweep; sweep beyond it before you trust it" if at_end else line


def draw(sweep: Sweep, outcomes: list[Outcome], path: Path) -> None:
    """Plots the validation loss over the swept number; runs that diverged are crosses at the upper edge."""
    from ..common.figures import plt, save  # slow to import, and not needed before the runs have ended

    best = best_of(outcomes)
    ended = [(outcome.value, outcome.loss) for outcome in outcomes if outcome.loss is not None]
    diverged = [outcome.value for outcome in outcomes if outcome.loss is None]
    figure, axes = plt.subplots(figsize=(6, 4), dpi=120, layout="constrained")
    axes.plot(*zip(*ended, strict=True), marker="o", color="tab:blue")
    axes.plot([best.value], [best.loss], marker="o", markersize=11, fillstyle="none", color="tab:red")
    for value in diverged:
        axes.plot([value], [0.97], "x", color="tab:gray", transform=axes.get_xaxis_transform())
    title = f"{len(outcomes)} runs, the best at {best.value:g} with {best.loss:.4f}"
    title += f", {len(diverged)} diverged (crosses)" if diverged else ""
    axes.set(xscale="log", xlabel=sweep.name, ylabel="validation loss (nats per target)", title=title)
    axes.grid(alpha=0.3)
    save(figure, path)
