"""The RCMHA paper's comparison of MHA, MDHA, RMHA and RCMHA on characters, with training and validation kept apart.

    dynattn reproduce tiny-shakespeare --data tinyshakespeare.txt [--quick]

Trains all four attention types under one protocol, at the official segment of 2 characters and at one of 128, with
several seeds; then ablations of RCMHA, and WikiText-2 characters if `--wikitext_train` and `--wikitext_validation` are
given. Finished runs are not repeated, so an interrupted study resumes where it stopped, and seeds can be added later.
"""

from collections.abc import Sequence

from ...common.arguments import parse_arguments
from .arguments import StudyArguments


def main(argv: Sequence[str]) -> int:
    """Trains what is missing, then writes and prints the results."""
    arguments = parse_arguments(StudyArguments, argv, prog="dynattn reproduce tiny-shakespeare", description=__doc__)
    from .job import run_study  # slow to import, so not before the arguments are parsed

    print(run_study(arguments))
    return 0
