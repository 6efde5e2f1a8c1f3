"""The record of the study: its finished runs, their comparisons, and the figures that the paper reports."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...common.environment import distinct, of_runs
from ...common.errors import UserError
from ...common.paired import paired_difference, spread
from ..study_runs import read_result
from .plan import GROUPS, TYPES

Run = dict[str, Any]
Record = dict[str, Any]
Cell = tuple[str, str]  # a group and one of its variants

PAPER_ORDER = ("rcmha", "mha", "mdha", "rmha")
QUOTED = {
    "accuracy": {"mha": 0.566, "mdha": 0.557, "rmha": 0.555, "rcmha": 0.572},
    "source": (
        "arXiv 2308.03429, quoted and not measured here. Its abstract states RCMHA's figure and that it is the best; "
        "the other three are quoted at second hand and were not checked against the paper."
    ),
    "meaning": (
        "The official code keeps one running count over training and validation batches since the start of a run, and "
        "never resets it: about nine parts of training to one of validation, early updates included. As released, its "
        "script builds RMHA where RCMHA is meant. No spread over seeds is known."
    ),
    "memory": (
        "The abstract also reports 2.98 GB for RCMHA (it prints RMHA) against 3.5 GB for RMHA. RCMHA is RMHA plus "
        "convolutions; what an update of each takes under one protocol is below."
    ),
}
SCORES = ("accuracy", "bits_per_character")
COSTS = ("tokens_per_second", "wall_seconds", "train_cpu_seconds")
# What may differ between the runs that a group compares.
OF_A_VARIANT = ("group", "variant", "seed", "model")


def read_runs(output: Path) -> dict[Cell, list[Run]]:
    """The finished runs of a study by group and variant, in the order of the plan, seeds ascending."""
    found: dict[Cell, list[Run]] = {(name, variant): [] for name, group in GROUPS.items() for variant in group.variants}
    for path in sorted(output.glob("runs/*/*.json")):
        run = read_result(path)
        found.setdefault((run["settings"]["group"], run["settings"]["variant"]), []).append(run)
    return {cell: sorted(runs, key=seed_of) for cell, runs in found.items() if runs}


def make_record(runs: Mapping[Cell, Sequence[Run]], probe: Mapping[str, Any] | None) -> Record:
    """Everything that the table and the plots are made from.

    Args:
        runs: finished runs; groups may be incomplete; comparisons use the seeds that both variants have.
        probe: time and memory of an update.

    Raises:
        UserError: some do not compare.
    """
    every = [run for group in runs.values() for run in group]
    check_comparable(every)
    return {
        "quoted": QUOTED,
        "cells": [summarize(cell, group) for cell, group in runs.items()],
        "comparisons": [
            compare(runs, cell, baseline)
            for cell in runs
            if (baseline := GROUPS[cell[0]].baseline_of(cell[1])) != cell and baseline in runs
        ],
        "orders": [order for group in GROUPS if (order := check_order(runs, group))],
        "probe": probe,
        **of_runs(every),
        "threads": distinct(run["threads"] for run in every),
        "runs": every,
    }


def cells_by_group(record: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The cells of a record, by group in the order of the plan; groups without any are left out."""
    cells = {name: [cell for cell in record["cells"] if cell["group"] == name] for name in GROUPS}
    return {name: found for name, found in cells.items() if found}


def check_comparable(runs: Iterable[Mapping[str, Any]]) -> None:
    """Raises UserError unless all runs that are averaged or paired were trained, and scored, in the same way.

    Args:
        runs: `settings` and `data` of finished or planned ones.
    """
    first: dict[Any, Mapping[str, Any]] = {}
    for run in runs:
        cell = run["settings"]["group"], run["settings"]["variant"]
        # A group and the one of its baseline share a protocol, and the runs of a variant the model, too.
        for place, ignored in ((GROUPS[cell[0]].baseline[0], OF_A_VARIANT), (cell, ("seed",))):
            other = first.setdefault(place, run)
            if changed := differences(run, other, ignored):
                raise UserError(
                    f"the runs {name_of(other)} and {name_of(run)}, finished or asked for, differ in "
                    f"{', '.join(changed)}; give another --output, or move those of one kind out of its runs"
                )


def differences(run: Mapping[str, Any], other: Mapping[str, Any], ignored: Collection[str]) -> list[str]:
    """The names of the settings, except some, in which two runs differ, and of the text if they read another one."""
    one, another = run["settings"], other["settings"]
    names = [name for name in {**one, **another} if name not in ignored and one.get(name) != another.get(name)]
    return names if run["data"] == other["data"] else [*names, "text"]


def name_of(run: Mapping[str, Any]) -> str:
    """How messages call a run."""
    return "{group}: {variant}, seed {seed}".format(**run["settings"])


def summarize(cell: Cell, runs: Sequence[Run]) -> dict[str, Any]:
    """Mean and spread of what the runs of one variant measured."""
    splits = ("train", "validation", "all_training_batches")
    return {
        "group": cell[0],
        "variant": cell[1],
        "seeds": [seed_of(run) for run in runs],
        "parameters": runs[0]["parameters"],
        **{split: {score: spread([run[split][score] for run in runs]) for score in SCORES} for split in splits},
        **{name: spread([run[name] for run in runs]) for name in COSTS},
    }


def compare(runs: Mapping[Cell, Sequence[Run]], cell: Cell, than: Cell) -> dict[str, Any]:
    """Validation scores of a variant minus those of another, over the seeds that both have."""
    ours, others = ({seed_of(run): run["validation"] for run in runs[one]} for one in (cell, than))
    seeds = sorted(ours.keys() & others.keys())
    differences = {
        score: paired_difference([ours[seed][score] for seed in seeds], [others[seed][score] for seed in seeds])
        for score in (SCORES if seeds else ())
    }
    return {"group": cell[0], "variant": cell[1], "than": list(than), "seeds": seeds, **differences}


def check_order(runs: Mapping[Cell, Sequence[Run]], group: str) -> dict[str, Any] | None:
    """Whether validation accuracy gives the paper's order of the types; None if they share no seed that ended well."""
    ended = {kind: [run for run in runs.get((group, kind), ()) if has_ended_well(run)] for kind in TYPES}
    scores = {kind: {seed_of(run): run["validation"]["accuracy"] for run in ended[kind]} for kind in TYPES}
    seeds = sorted(set.intersection(*map(set, scores.values())))
    if not seeds:
        return None
    shared = {(group, kind): [run for run in ended[kind] if seed_of(run) in seeds] for kind in TYPES}
    order = _best_first({kind: spread([scores[kind][seed] for seed in seeds])["mean"] for kind in TYPES})
    by_seed = {seed: _best_first({kind: scores[kind][seed] for kind in TYPES}) for seed in seeds}
    return {
        "group": group,
        "seeds": seeds,
        "order": order,
        "is_the_papers": order == list(PAPER_ORDER),
        "seeds_in_the_papers_order": [seed for seed in seeds if by_seed[seed] == list(PAPER_ORDER)],
        "pairs": [compare(shared, (group, better), (group, worse)) for better, worse in pairwise(PAPER_ORDER)],
    }


def _best_first(accuracy: Mapping[str, float]) -> list[str]:
    return sorted(accuracy, key=lambda kind: -accuracy[kind])


def has_ended_well(run: Mapping[str, Any]) -> bool:
    """Whether a finished run has an accuracy; one that diverged has none."""
    return math.isfinite(run["validation"]["accuracy"])


def seed_of(run: Mapping[str, Any]) -> int:
    """The seed of a finished run."""
    return run["settings"]["seed"]
