"""The whole study: its missing runs, then record, table and plot."""

from functools import partial
from pathlib import Path

from ...common.arguments import command_line
from ...compare.job import Losses, choose_rate, measured_run, report_arms
from ...compare.record import Record, make_record
from ...compare.study_folder import claim
from ...pretrain.same_texts import check_same_texts
from .arguments import UpcyclingArguments
from .runs import ARMS, Runs


def run_study(arguments: UpcyclingArguments) -> str:
    """Trains what is missing, then writes record, table and plot; returns the table and the names of the files.

    Raises:
        UserError: the folder holds a study with other settings, a run failed, or there is no record to redraw.
    """
    output = Path(str(arguments.output))
    return report_arms(output, None if arguments.redraw else lambda: make_runs(arguments, output))


def command_of(arguments: UpcyclingArguments) -> str:
    """The command line that repeats the study, wherever its folder is."""
    names = ("seeds", "tuning_seed", "learning_rates", "parent_steps", "steps")
    return command_line("reproduce upcycling", {name: getattr(arguments, name) for name in names})


def make_runs(arguments: UpcyclingArguments, output: Path) -> Record:
    """Trains what is missing and returns the record.

    Raises:
        UserError: a rate is refused, the folder holds a study with other settings or texts, or a run failed.
    """
    runs = Runs(output, arguments.parent_steps, arguments.steps)
    planned = runs.planned((arguments.tuning_seed, *arguments.seeds), arguments.learning_rates)
    claim(output, runs.settings(), "upcycling study")
    check_same_texts(planned)
    rates, losses = choose_rates(arguments, runs)
    tuning = {"tuning_seed": arguments.tuning_seed, "learning_rates": arguments.learning_rates, "tuning_losses": losses}
    measured = {
        seed: {name: measured_run(partial(runs.continued, seed, name, rate)) for name, rate in rates.items()}
        for seed in arguments.seeds
    }
    parents = [measured_run(partial(runs.parent, seed)) for seed in arguments.seeds]
    record = make_record(
        {**runs.settings(), **tuning, "chosen": rates},
        arms={name: {seed: ended[name] for seed, ended in measured.items()} for name in ARMS},
        labels={name: arm.label for name, arm in ARMS.items()},
        parents=[parent for parent in parents if parent is not None],
    )
    return {**record, "command": command_of(arguments)}


def choose_rates(arguments: UpcyclingArguments, runs: Runs) -> tuple[dict[str, float], dict[str, Losses]]:
    """The learning rate of each arm, one for all that compose, and the losses from which the rates are chosen."""
    trials = {name: partial(runs.continued, arguments.tuning_seed, name) for name in ("plain", "composed")}
    chosen = {name: choose_rate(trial, arguments.learning_rates) for name, trial in trials.items()}
    rates = {name: chosen["composed" if arm.composed else "plain"][0] for name, arm in ARMS.items()}
    return rates, {name: losses for name, (_, losses) in chosen.items()}
