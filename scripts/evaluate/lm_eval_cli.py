"""The `lm_eval` command with this package's model types registered and its tasks known.

Run: `dynattn lm-eval run --model hf --model_args pretrained=CHECKPOINT --tasks builtin_heldout`

The plain `lm_eval` command does not import this package, and so does not know its model types. The import of lm_eval's
command line is light: it imports torch and Transformers only when it runs a model.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence

from lm_eval._cli import HarnessCLI
from lm_eval.utils import setup_logging

from ..common.errors import UserError
from .suites import TASKS


def main(argv: Sequence[str]) -> int:
    """Runs lm_eval with its own arguments; `--include_path` adds tasks to those of this package.

    Raises:
        UserError: lm_eval refused the arguments, could not read something, or lacks a package, such as vLLM.
    """
    sys.argv = ["dynattn lm-eval", *argv]  # lm_eval reads, and completes, the process's own arguments
    setup_logging()
    cli = HarnessCLI()
    arguments = cli.parse_args()
    try:
        arguments.include_path = task_folders(arguments)
        cli.execute(arguments)
    except (ValueError, OSError) as error:
        raise UserError(str(error).strip()) from error
    except ModuleNotFoundError as error:
        advice = "; pip install 'dynattn[vllm]'" if error.name == "vllm" else ""
        raise UserError(f"{error}{advice}") from error
    return 0


def task_folders(arguments: Namespace) -> list[str]:
    """The folders with task files besides lm_eval's own: this package's, and those that the user names.

    lm_eval prefers `--include_path` to the field of the file `--config`, which it would not read beside ours.
    """
    theirs = getattr(arguments, "include_path", None)
    if theirs is None and (file := getattr(arguments, "config", None)) is not None:
        from lm_eval.config.evaluate_config import EvaluatorConfig  # slow to import

        theirs = EvaluatorConfig.load_yaml_config(file).get("include_path")
    return [str(TASKS), *([theirs] if isinstance(theirs, str) else theirs or [])]
