"""Shows how a model composes its heads on a text, with numbers and pictures on one self-contained HTML page.

Run: `dynattn inspect MODEL --output FOLDER [--text TEXT]`

The page shows for each layer how large each term of the composition is, and how alike heads are before and after it.
For one layer it draws the maps, and how much of each head's map goes into each other one's. It also has the loss of
the model without each term.
"""

from collections.abc import Sequence

from ..common.arguments import parse_arguments
from .arguments import InspectArguments


def main(argv: Sequence[str]) -> int:
    """Inspects a model and prints where the page is."""
    arguments = parse_arguments(InspectArguments, argv, words=1, prog="dynattn inspect MODEL", description=__doc__)
    # This imports torch and Transformers, which help and a mistyped option need not wait for.
    from .job import inspect

    page = inspect(arguments)
    print(f"wrote {page}")
    return 0
