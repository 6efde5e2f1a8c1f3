"""The command of a study whose package has a `job`."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from ..common.arguments import parse_arguments


def study_main(name: str, options: type[Any], description: str | None, argv: Sequence[str]) -> int:
    """Runs what is missing of `dynattn reproduce NAME`, prints the results, and returns the exit status.

    Args:
        name: of the study. The module `job` of its package has `run_study`, which returns the text to print.
        options: dataclass of its arguments.
        description: for `--help`.
        argv: what follows the name.
    """
    arguments = parse_arguments(options, argv, prog=f"dynattn reproduce {name}", description=description)
    # Slow to import, so not before the arguments are parsed.
    job = import_module(f".{name.replace('-', '_')}.job", __package__)
    print(job.run_study(arguments))
    return 0
