"""Compares upcycling with continued training of a plain model: do composed heads lower the loss?

    dynattn reproduce upcycling [--quick]

For every seed (initial weights and order of the data) a small GPT-NeoX is trained on the built-in corpus, and converted
to composed heads as by `dynattn convert pythia`. Then training continues on the same tokens in the same order in four
arms: plain, composed, composed with a higher learning rate for the composition, and composed with the parent's weights
frozen at first. The learning rates of the first two are chosen on a seed that is not measured; the others use the rate
of the second. Finished runs are not repeated, so an interrupted study resumes where it stopped.
"""

from collections.abc import Sequence

from ...common.arguments import parse_arguments
from .arguments import UpcyclingArguments


def main(argv: Sequence[str]) -> int:
    """Runs what is missing of the study, then writes and prints the results."""
    arguments = parse_arguments(UpcyclingArguments, argv, prog="dynattn reproduce upcycling", description=__doc__)
    from .job import run_study  # slow to import, so not before the arguments are parsed

    print(run_study(arguments))
    return 0
