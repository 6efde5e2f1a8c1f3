"""Makes a checkpoint loadable anywhere: writes a folder with the model's code, verifies it, and can push it to the Hub.

Run: `dynattn publish CHECKPOINT [--output FOLDER] [--repo NAME/MODEL] [--dry_run]`
"""

import sys
from collections.abc import Sequence

from ..common.arguments import parse_arguments
from ..common.errors import printable
from .arguments import PublishArguments


def main(argv: Sequence[str]) -> int:
    """Publishes and prints what was written, verified and pushed."""
    arguments = parse_arguments(PublishArguments, argv, words=1, prog="dynattn publish CHECKPOINT", description=__doc__)
    # This imports torch and Transformers, which help and a mistyped option need not wait for.
    from .job import publish

    publication = publish(arguments)
    for warning in publication.warnings():
        print(f"warning: {printable(warning)}", file=sys.stderr)
    print("\n".join(map(printable, publication.report(arguments.repo))))
    return 0
