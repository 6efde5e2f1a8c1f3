"""Makes a checkpoint loadable anywhere: writes a folder with the model's code, verifies it, and can push it to the Hub.

Run: `dynattn publish CHECKPOINT [--output FOLDER] [--repo NAME/MODEL] [--dry_run]`
"""

import sys
from collections.abc import Sequence

from ..common.arguments import name_words, parse_arguments
from ..common.errors import printable
from .arguments import PublishArguments


def main(argv: Sequence[str]) -> int:
    """Publishes and prints what was written, verified and pushed."""
    argv = name_words(argv, PublishArguments, 1)
    arguments = parse_arguments(PublishArguments, argv, prog="dynattn publish CHECKPOINT", description=__doc__)
    # These import torch and Transformers, which help and a mistyped option need not wait for.
    from .job import publish
    from .report import describe, warnings

    publication = publish(arguments)
    for warning in warnings(publication):
        print(f"warning: {printable(warning)}", file=sys.stderr)
    print("\n".join(map(printable, describe(publication, arguments))))
    return 0
