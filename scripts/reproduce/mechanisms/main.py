"""Asks on small tasks what mixing heads buys: do H composed heads solve what 2H plain heads need?

    dynattn reproduce mechanisms [--quick] [--workers 2] [--max_seconds 10000]

Every task states facts and asks about them. Small models with each kind of attention read fresh sequences until they
answer 99 of 100 questions right, or until their updates are over. What counts is how many sequences they needed, with
runs that never got there counted as censored: survival curves and log-rank tests beside the baseline. Each attention
gets its learning rate on a seed that is not measured. Finished runs are not repeated, so an interrupted study goes on.
"""

from collections.abc import Sequence

from ...common.arguments import parse_arguments
from .arguments import MechanismsArguments


def main(argv: Sequence[str]) -> int:
    """Runs what is missing of the study, then writes and prints the results."""
    arguments = parse_arguments(MechanismsArguments, argv, prog="dynattn reproduce mechanisms", description=__doc__)
    from .job import run_study  # slow to import, so not before the arguments are parsed

    print(run_study(arguments))
    return 0
