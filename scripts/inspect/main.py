"""Shows what composing does to the heads of a model on a text: one page that needs nothing else, pictures and numbers.

Run: `dynattn inspect MODEL --output FOLDER [--text TEXT]`

The page tells for each layer how large each term is, how alike heads are before and after composing, which head's maps
go into which head's, and how much worse the model gets without a term.
"""

from collections.abc import Sequence

from ..common.arguments import name_first, parse_arguments
from .arguments import InspectArguments


def main(argv: Sequence[str]) -> int:
    """Inspects a model and prints where the page is."""
    argv = name_first(argv, "model")
    arguments = parse_arguments(InspectArguments, argv, prog="dynattn inspect", description=__doc__)
    # This imports torch and Transformers, which help and a mistyped option need not wait for.
    from .job import inspect

    page = inspect(arguments)
    print(f"wrote {page}")
    return 0
