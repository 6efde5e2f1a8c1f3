"""The whole study: its missing runs, then record, table and plot."""

import json
from functools import partial
from pathlib import Path

from ...common.arguments import command_line
from ...compare.job import choose_rates, measured_arms, measured_run, report_arms
from ...compare.record import Record, make_record
from ...compare.study_folder import claim
from ...pretrain.same_texts import check_same_texts
from ..study_runs import chosen, text_name
from .arguments import UpcyclingArguments
from .runs import ARMS, COMPARED, Runs


def run_study(arguments: UpcyclingArguments) -> str:
    """Trains what is missing, then writes record, table and plot; returns the table and the names of the files.

    Raises:
        UserError: the folder holds a study with other settings, a run failed, or there is no record to redraw.
    """
    output = Path(str(arguments.output))
    return report_arms(output, lambda: make_runs(arguments, output), redraw=arguments.redraw)


def command_of(arguments: UpcyclingArguments) -> str:
    """The command line that repeats the study, wherever its folder and its texts are."""
    names = ["seeds", "tuning_seed", "learning_rates", "parent_steps", "steps", "arms"]
    if not arguments.trains_parents:
        names.remove("parent_steps")
    options = {name: getattr(arguments, name) for name in names}
    texts = {name: text_name(text) for name, text in arguments.texts.items() if text != "builtin"}
    given = {"parent": text_name(arguments.parent), "hidden_size": arguments.hidden_size}
    parents = {name: value for name, value in given.items() if value != getattr(UpcyclingArguments, name)}
    common = {"common": json.dumps(arguments.for_all)} if arguments.for_all else {}
    return command_line("reproduce upcycling", {**parents, **options, **common, **texts})


def make_runs(arguments: UpcyclingArguments, output: Path) -> Record:
    """Trains what is missing and returns the record.

    Raises:
        UserError: an arm does not exist, a rate is refused, the folder holds a study with other settings or texts, or a
            run failed.
    """
    runs = Runs(output, arguments)
    arms = {name: ARMS[name] for name in ("plain", *chosen("arm", arguments.arms, COMPARED))}
    planned = runs.planned(arms, (arguments.tuning_seed, *arguments.seeds), arguments.learning_rates)
    claim(output, runs.settings(), "upcycling study")
    check_same_texts(planned)
    # Arms that compose share a learning rate, and so do those that do not.
    tuned = {name: "composed" if arm.composed else "plain" for name, arm in arms.items()}
    shared, tuning = choose_rates(
        runs.continued, dict.fromkeys(tuned.values()), arguments.learning_rates, arguments.tuning_seed
    )
    rates = {name: shared[like] for name, like in tuned.items()}
    measured = measured_arms(runs.continued, rates, arguments.seeds)
    seeds_with_parents = arguments.seeds if arguments.trains_parents else []
    parents = [measured_run(partial(runs.parent, seed)) for seed in seeds_with_parents]
    record = make_record(
        {**runs.settings(), **tuning, "chosen": rates},
        measured,
        labels={name: arm.label for name, arm in arms.items()},
        parents=[parent for parent in parents if parent is not None],
    )
    return {**record, "command": command_of(arguments)}
