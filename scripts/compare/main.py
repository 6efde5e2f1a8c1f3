"""Trains variants of a model from the same seeds on the same data, and compares them in pairs.

    dynattn compare plain.yaml composed.yaml [more.yaml ...] --seeds 5 --output runs/compare

Each file holds arguments of `dynattn pretrain` for one variant, of any model type; the first is the baseline. All must
read the same data with the same tokenizer and length of sequences, because other losses cannot be compared. With
--learning_rates each variant is trained with the best of them, which is chosen on a seed that is not compared (a rate
that diverges is not chosen). A compared run that diverges is named, and its variant compared on the other seeds.
Finished runs are not repeated: the same command continues an interrupted comparison, and more seeds can be added later.
"""

from collections.abc import Sequence
from itertools import takewhile

from ..common.arguments import parse_arguments
from .arguments import CompareArguments


def main(argv: Sequence[str]) -> int:
    """Runs what is missing of the comparison, then writes and prints the results."""
    prog, words = "dynattn compare BASELINE.yaml OTHER.yaml [...]", name_variants(argv)
    arguments = parse_arguments(CompareArguments, words, prog=prog, description=__doc__, file=False)
    from .job import run_comparison  # slow to import, so not before the arguments are parsed

    print(run_comparison(arguments))
    return 0


def name_variants(argv: Sequence[str]) -> list[str]:
    """Puts `--variants` in front of the words before the first option."""
    words = list(takewhile(lambda word: not word.startswith("-"), argv))
    return ["--variants", *words, *argv[len(words) :]] if words else list(argv)
