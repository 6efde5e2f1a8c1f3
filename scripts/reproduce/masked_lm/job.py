"""The whole study: its missing runs, then record, table and plot."""

from pathlib import Path

from ...common.arguments import command_line
from ...compare.job import choose_rates, measured_arms, report_arms
from ...compare.record import Record, compare_arms, make_record
from ...compare.study_folder import claim
from ...pretrain.same_texts import check_same_texts
from ..study_runs import text_name
from .arguments import ARMS, MaskedLMArguments
from .runs import Runs


def run_study(arguments: MaskedLMArguments) -> str:
    """Trains what is missing, then writes record, table and plot; returns the table and the names of the files.

    Raises:
        UserError: the folder holds a study with other settings, a run failed, or there is no record to redraw.
    """
    output = Path(str(arguments.output))
    return report_arms(output, lambda: make_runs(arguments, output), redraw=arguments.redraw)


def make_runs(arguments: MaskedLMArguments, output: Path) -> Record:
    """Trains what is missing and returns the record.

    Raises:
        UserError: a rate is refused, the folder holds a study with other settings or texts, or a run failed.
    """
    runs = Runs(output, arguments)
    planned = runs.planned()
    claim(output, runs.settings(), "study of masked language modeling")
    check_same_texts(planned)
    rates, tuning = choose_rates(runs.trained, arguments.arms, arguments.learning_rates, arguments.tuning_seed)
    arms = measured_arms(runs.trained, rates, arguments.seeds)
    settings = {**runs.settings(), **tuning, "chosen": rates}
    record = make_record(settings, arms, {arm: ARMS[arm][0] for arm in arms})
    for arm in ("dynamic", "all"):  # which have as many parameters as the wide one
        if {"wide", arm} <= set(arms):
            record[f"{arm}_against_wide"] = compare_arms(arms["wide"], arms[arm])
    return {"command": command_of(arguments), **record}


def command_of(arguments: MaskedLMArguments) -> str:
    """The command line that repeats the study, from a folder that holds the data."""
    names = ("arms", "seeds", "tuning_seed", "learning_rates", "steps", "validations", "small")
    texts = {name: text_name(getattr(arguments, name)) for name in ("dataset", "validation_dataset")}
    return command_line("reproduce masked-lm", {**texts, **{name: getattr(arguments, name) for name in names}})
