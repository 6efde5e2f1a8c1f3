"""The `lm_eval` command with our model types registered and our tasks known.

Run: `dynattn lm-eval run --model hf --model_args pretrained=CHECKPOINT --tasks builtin_heldout`

The plain `lm_eval` command does not import this package, whose import registers the model types. lm_eval's command
line is itself light: it imports torch and Transformers when it runs a model.
"""

import sys
from collections.abc import Sequence

from lm_eval._cli import HarnessCLI
from lm_eval.utils import setup_logging

from ..common.errors import UserError
from .suites import TASKS


def main(argv: Sequence[str]) -> int:
    """Runs lm_eval with its own arguments; `--include_path` adds to our tasks instead of replacing them.

    Raises:
        UserError: lm_eval refused the arguments or could not read something.
    """
    sys.argv = ["dynattn lm-eval", *argv]  # lm_eval reads, and completes, the process's own arguments
    setup_logging()
    cli = HarnessCLI()
    arguments = cli.parse_args()
    theirs = getattr(arguments, "include_path", None)
    arguments.include_path = [str(TASKS), theirs] if theirs else [str(TASKS)]
    try:
        cli.execute(arguments)
    except (ValueError, OSError) as error:
        raise UserError(str(error).strip()) from error
    return 0
