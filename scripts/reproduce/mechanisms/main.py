"""Asks on small tasks what mixing heads contributes: do H composed heads solve what 2H plain heads need?

    dynattn reproduce mechanisms [--quick] [--workers 2] [--max_seconds 10000]

Every sequence of a task states facts and asks about them. Small models with each kind of attention read fresh sequences
until they answer 99 of 100 questions right, or until their updates are over. The result is how many sequences a run
needed; runs that did not solve the task are censored. Exact log-rank tests compare each attention with the baseline.
The learning rate of each attention is chosen on a seed that is not measured. Finished runs are not repeated, so an
interrupted study resumes where it stopped.
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
