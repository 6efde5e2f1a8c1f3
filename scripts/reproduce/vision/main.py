"""Asks what composing heads does to small vision transformers, apart from other changes of the official comparison.

    dynattn reproduce vision [--quick] [--workers 2] [--max_seconds 10000]

The authors' DCViT differs from a plain vision transformer by dynamic composition, by a static matrix that mixes heads,
and by a norm of queries and keys. Here each is an arm of its own, and one plain arm has as many parameters as the
authors' model. There are three tasks: scikit-learn's handwritten digits with cross-validation; letters and digits in
fonts that were not seen in training; and the same when the training of a model without composition is continued with
each arm. Finished runs are not repeated, so an interrupted study resumes where it stopped.
"""

from collections.abc import Sequence

from ...common.arguments import parse_arguments
from ..paired_study.arguments import PairedStudyArguments


def main(argv: Sequence[str]) -> int:
    """Runs what is missing of the study, then writes and prints the results."""
    arguments = parse_arguments(PairedStudyArguments, argv, prog="dynattn reproduce vision", description=__doc__)
    from ..paired_study.job import run_study  # slow to import, so not before the arguments are parsed
    from .study import VISION

    print(run_study(VISION, arguments))
    return 0
