"""The whole comparison: its missing runs, then record, table and plot."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from shlex import join
from typing import Any

from ..common.atomic_file import write_whole
from ..common.commands import import_words
from ..common.errors import UserError
from ..pretrain import PretrainArguments, pretrain
from ..pretrain.dry_run.estimates import expected_vocabulary
from ..pretrain.guard import DivergedError
from ..pretrain.model import build_model
from ..pretrain.model_config import plan_config
from ..pretrain.same_texts import check_same_texts
from ..pretrain.stopping import deadline_after
from .arguments import CompareArguments
from .figures import PLOT, draw_arms
from .record import Record, RunRecord, make_record, read_run
from .study_folder import claim, draw, lock_of, write_record
from .table import table
from .variants import Variant, read_variants

Rates = dict[str, float | None]
# The last validation loss for each learning rate; None for a run that diverged.
Losses = dict[str, float | None]
# Makes the run of a seed, an arm and a learning rate, unless it has ended, and returns its folder.
Train = Callable[[int, str, Any], Path]
DIVERGED = "diverged.txt"


def run_comparison(arguments: CompareArguments) -> str:
    """Trains what is missing, then writes record, table and plot; returns the table and the names of the files.

    Raises:
        UserError: the variants do not compare, the folder holds another study, a run failed, or there is no record to
            redraw.
    """
    variants = [] if arguments.redraw else read_variants(arguments.variants, arguments.common)
    return compare_variants(arguments, variants, command_of(arguments))


def compare_variants(
    arguments: CompareArguments, variants: Sequence[Variant], command: str, quoted: Mapping[str, Any] | None = None
) -> str:
    """Does the work of `run_comparison` for variants that were read already.

    Args:
        command: the command line that repeats the comparison, for the record.
        quoted: a published ratio of FLOPs, which is drawn beside the measured ones: `label`, `source` and `interval`.
    """
    output = Path(arguments.output)

    def measure() -> Record:
        return {**make_runs(arguments, variants, output), "command": command, "quoted": quoted}

    return report_arms(output, measure, redraw=arguments.redraw)


def report_arms(output: Path, measure: Callable[[], Record], *, redraw: bool) -> str:
    """Writes the record of a study of arms, its table and its plot; returns the table and the names of the files.

    Args:
        measure: makes the runs that are missing and returns the record; the folder is locked during the call.
        redraw: draws the record that is there, without that call.
    """
    if not redraw:
        with lock_of(output):
            write_record(output, measure())
    return draw(output, table, draw_arms, PLOT)


def make_runs(arguments: CompareArguments, variants: Sequence[Variant], output: Path) -> Record:
    """Trains what is missing and returns the record of the seeds that all variants have ended.

    Raises:
        UserError: a learning rate or a model is not valid, the folder holds something else or runs on other texts, time
            was over before two seeds were complete, or all runs of the baseline diverged.
    """
    runs = Runs(output, {variant.name: variant for variant in variants}, deadline_after(arguments.max_seconds))
    # Builds the arguments of all runs now, so that one that is not valid is refused before the first run.
    seeds = (arguments.tuning_seed, *arguments.measured_seeds)
    cells = product(runs.variants, seeds, arguments.learning_rates or (None,))
    planned = [runs.arguments(seed, name, rate) for name, seed, rate in cells]
    check_models(runs)
    settings = {"variants": {name: dict(variant.options) for name, variant in runs.variants.items()}}
    claim(output, settings, "comparison")
    check_same_texts(planned)
    arms: dict[str, dict[int, RunRecord | None]] = {name: {} for name in runs.variants}
    try:
        rates, tuning = choose_rates(runs.trained, arms, arguments.learning_rates, arguments.tuning_seed)
        # One seed at a time: when time is over, seeds that not all variants have ended are left out.
        for seed in arguments.measured_seeds:
            for name, ended in measured_arms(runs.trained, rates, [seed]).items():
                arms[name] |= ended
    except OutOfTimeError as error:
        complete = len(arms[variants[0].name])
        if complete < 2:
            raise UserError(f"{error}; {complete} seeds are complete, and a comparison needs 2 or more") from error
        print(f"\n{error}; {complete} of {arguments.seeds} seeds are complete", flush=True)
    return make_record({**settings, **tuning, "chosen": rates}, arms, {name: name for name in arms})


def check_models(runs: "Runs") -> None:
    """Raises UserError for a variant whose model cannot be built, before the runs of other variants take their time."""
    for name in runs.variants:
        arguments = runs.arguments(seed=0, name=name, rate=None)
        try:
            build_model(arguments, plan_config(arguments, expected_vocabulary(arguments)))
        except UserError as error:
            raise UserError(f"{name}: {error}") from error


def choose_rates(
    train: Train, arms: Iterable[str], rates: Sequence[float] | None, seed: int
) -> tuple[Rates, dict[str, Any]]:
    """The learning rate of each arm, the best of `rates` on a seed, and what the record says of the choice.

    Without `rates` it is None, and each arm is trained with a rate of its own.
    """
    chosen: Rates = dict.fromkeys(arms)
    losses: dict[str, Losses] = {}
    for arm in chosen if rates else ():
        chosen[arm], losses[arm] = choose_rate(partial(train, seed, arm), rates or ())
    return chosen, {"tuning_seed": seed, "learning_rates": rates, "tuning_losses": losses}


def measured_arms(
    train: Train, rates: Mapping[str, float | None], seeds: Iterable[int]
) -> dict[str, dict[int, RunRecord | None]]:
    """Makes the runs of all arms, a seed in all of them before the next one; None for a run that diverged."""
    arms: dict[str, dict[int, RunRecord | None]] = {arm: {} for arm in rates}
    for seed, (arm, rate) in product(seeds, rates.items()):
        arms[arm][seed] = measured_run(partial(train, seed, arm, rate))
    return arms


def choose_rate(train: Callable[[float], Path], rates: Sequence[float]) -> tuple[float, Losses]:
    """The learning rate with the lowest final validation loss, and the losses of all; a single rate needs no run.

    Args:
        train: makes the run with a learning rate, and returns its folder.

    Raises:
        UserError: the runs with all rates diverged.
    """
    if len(rates) == 1:
        return rates[0], {}
    losses: dict[float, float] = {}
    for rate in rates:
        try:
            losses[rate] = read_run(train(rate))["validation"][-1]["loss"]
        except DivergedError as error:
            print(f"learning rate {rate:g}: {error}", flush=True)
            last = error
    if not losses:
        raise UserError(f"the runs with all learning_rates={list(rates)} diverged; give lower ones. The last: {last}")
    return min(losses, key=lambda rate: losses[rate]), {f"{rate:g}": losses.get(rate) for rate in rates}


def measured_run(train: Callable[[], Path]) -> RunRecord | None:
    """Makes a run that is not for tuning and reads it; None if it diverged. The study then goes on with its other runs.

    Args:
        train: makes the run and returns its folder.
    """
    try:
        return read_run(train())
    except DivergedError as error:
        print(error, flush=True)
        return None


def has_ended(folder: Path) -> bool:
    """Whether the run of a folder is finished or has diverged; the folder `model` appears only when it is complete."""
    return (folder / "model").exists() or (folder / DIVERGED).exists()


def train_once(arguments: PretrainArguments) -> Path:
    """Makes a run, or resumes it, unless it has ended, and returns its folder.

    Raises:
        DivergedError: the run has diverged, now or before.
    """
    folder = Path(arguments.output)
    if (told := folder / DIVERGED).exists():
        raise DivergedError(f"{told.read_text(encoding='utf-8')}; remove {folder} to train it again")
    if not has_ended(folder):
        print(f"\n{folder}", flush=True)
        try:
            pretrain(arguments)
        except DivergedError as error:
            write_whole(told, str(error))
            raise
    return folder


class OutOfTimeError(Exception):
    """The time of the arguments is over, and a run is missing."""


@dataclass(frozen=True)
class Runs:
    """Makes the runs of a comparison in the folder `output`, each once, and starts none after `deadline`."""

    output: Path
    variants: Mapping[str, Variant]
    deadline: float

    def trained(self, seed: int, name: str, rate: float | None) -> Path:
        """The folder of a run of a variant, which is made first if it has not ended.

        Raises:
            OutOfTimeError: the run has not ended, and the deadline is over.
            DivergedError: the run has diverged, now or before.
        """
        arguments = self.arguments(seed, name, rate)
        if time.monotonic() >= self.deadline and not has_ended(Path(arguments.output)):
            raise OutOfTimeError("the time is over; the same command goes on where it stopped")
        return train_once(arguments)

    def arguments(self, seed: int, name: str, rate: float | None) -> PretrainArguments:
        """The arguments of a run, whose folder is named after variant, seed and rate.

        Raises:
            UserError: an argument is not valid, or two contradict each other.
        """
        folder = self.output / f"seed-{seed}" / (name if rate is None else f"{name}-{rate:g}")
        changes = {} if rate is None else {"learning_rate": rate}
        return PretrainArguments(output=str(folder), seed=seed, **{**self.variants[name].options, **changes})


def command_of(arguments: CompareArguments) -> str:
    """The command line that repeats the comparison, from a folder that holds the files of the variants."""
    files = [Path(file).name for file in arguments.variants]
    words = ["dynattn", "compare", *import_words(), *files, "--seeds", str(arguments.seeds)]
    if arguments.first_seed:
        words += ["--first_seed", str(arguments.first_seed)]
    if arguments.common:
        common = arguments.common if isinstance(arguments.common, str) else json.dumps(arguments.common)
        words += ["--common", common]
    if arguments.learning_rates:
        words += ["--learning_rates", *map(str, arguments.learning_rates)]
        words += ["--tuning_seed", str(arguments.tuning_seed)]
    return join(words)
