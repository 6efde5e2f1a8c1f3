"""Trains a DCFormer without each term of its composition, and compares all of them with the plain one on text.

    dynattn reproduce ablations [--size small] [--dataset FILE --validation_dataset FILE] [--max_seconds 10000]

All variants are shipped with this study and run by `dynattn compare`: the same seeds, the same data in the same order,
differences paired by seed and corrected for the number of comparisons. One variant is plain with a wider MLP and has
as many parameters as full composition. Finished runs are not repeated, so an interrupted study goes on.
"""

from collections.abc import Sequence

from ...common.arguments import parse_arguments
from .arguments import AblationsArguments


def main(argv: Sequence[str]) -> int:
    """Runs what is missing of the study, then writes and prints the results."""
    arguments = parse_arguments(AblationsArguments, argv, prog="dynattn reproduce ablations", description=__doc__)
    from .job import run_study  # slow to import, so not before the arguments are parsed

    print(run_study(arguments))
    return 0
