"""Trains variants of a model from the same seeds on the same data, and compares them in pairs.

    dynattn compare plain.yaml composed.yaml [more.yaml ...] --seeds 5 --output runs/compare

Each file holds arguments of `dynattn pretrain` for one variant, of any model type; the first is the baseline. All must
read the same data with the same tokenizer, or their losses would not compare. With --learning_rates each variant gets
the best of them, chosen on a seed that is not measured; one whose run diverges is the worst. Finished runs are not
repeated: an interrupted comparison goes on where it stopped, and more seeds can be added later.
"""

from collections.abc import Sequence
from itertools import takewhile

from ..common.arguments import parse_arguments
from .arguments import CompareArguments


def main(argv: Sequence[str]) -> int:
    """Runs what is missing of the comparison, then writes and prints the results."""
    arguments = parse_arguments(CompareArguments, name_variants(argv), prog="dynattn compare", description=__doc__)
    from .job import run_comparison  # slow to import, so not before the arguments are parsed

    print(run_comparison(arguments))
    return 0


def name_variants(argv: Sequence[str]) -> list[str]:
    """Lets the words before the first option be the values of `--variants`."""
    words = list(takewhile(lambda word: not word.startswith("-"), argv))
    return ["--variants", *words, *argv[len(words) :]] if words else list(argv)
