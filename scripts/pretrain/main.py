"""Pretrains a language model, or continues one.

    dynattn pretrain [FILE.yaml] [--option value ...]
    torchrun --nproc_per_node 2 -m dynattn.scripts.cli pretrain [FILE.yaml] [--option value ...]

FILE.yaml is a file of yours or the name of one of the shipped `recipes`, like `tiny.yaml`.
The output folder must be on storage that all processes see. SIGINT, SIGTERM and SIGHUP end a run after its current
update, with a checkpoint from which the same command continues; the exit status is then 128 and the signal's number,
and 124 where `--max_seconds` were over. `--engine` says how processes share the model.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from ..common.arguments import parse_arguments
from ..common.errors import UserError
from .arguments import PretrainArguments
from .launcher import is_first_process
from .stopping import StoppedError

RECIPES = Path(__file__).parent / "recipes"
DESCRIPTION = "Pretrain a language model, or continue one. FILE.yaml is yours or a shipped one, such as tiny.yaml."


def main(argv: Sequence[str]) -> int:
    """Runs the job and returns its exit status; under torchrun only the first process reports a user's mistake."""
    try:
        arguments = parse_arguments(
            PretrainArguments, find_shipped(argv), prog="dynattn pretrain", description=DESCRIPTION
        )
        if arguments.dry_run:
            from .planning.dry_run import dry_run

            print(dry_run(arguments))
            return 0
        if arguments.sweep is not None:
            from .sweep import run_sweep

            told = run_sweep(arguments)
            if is_first_process():
                print(told)
            return 0
        from .job import pretrain  # here, because it imports torch, and help and mistyped options need to be fast

        result = pretrain(arguments)
    except UserError:
        if is_first_process():
            raise
        return 2
    except StoppedError as stopped:
        if is_first_process():
            print(f"\n{stopped}", file=sys.stderr)
        return stopped.status
    except KeyboardInterrupt:
        print("\ninterrupted; the same command continues from the newest checkpoint", file=sys.stderr)
        return 130
    if is_first_process():
        print(result.summary())
    return 0


def find_shipped(argv: Sequence[str]) -> list[str]:
    """Puts the path of a shipped YAML file in place of its bare name, unless the user has a file of that name."""
    shipped = {recipe.name: recipe for recipe in RECIPES.glob("*.yaml")}
    if not argv or argv[0] not in shipped or Path(argv[0]).exists():
        return list(argv)
    return [str(shipped[argv[0]]), *argv[1:]]
