"""Pretrains a language model, or continues one.

    dynattn pretrain [FILE.yaml] [--option value ...]
    torchrun --nproc_per_node 2 -m dynattn.scripts.cli pretrain [FILE.yaml] [--option value ...]

FILE.yaml is a file of yours or the name of one of the shipped `recipes`, like `tiny.yaml`.
The output folder must be on storage that all processes see. SIGINT, SIGTERM and SIGHUP end a run after its current
update, with a checkpoint from which the same command continues. The exit status is then 128 plus the number of the
signal, or 124 if `--max_seconds` ended the run. `--engine` says how processes share the model.
"""

import signal
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from ..common.arguments import name_words, parse_arguments
from ..common.errors import StoppedError
from ..common.launcher import is_first_process
from .arguments import PretrainArguments

RECIPES = Path(__file__).parent / "recipes"
SHIPPED = {recipe.name: recipe for recipe in sorted(RECIPES.glob("*.yaml"))}
DESCRIPTION = fill(
    f"Pretrain a language model, or continue one. FILE.yaml is yours or a shipped recipe: {', '.join(SHIPPED)}.", 120
)


def main(argv: Sequence[str]) -> int:
    """Runs the job, prints its summary in the first process, and returns the exit status."""
    arguments = parse_arguments(PretrainArguments, find_shipped(argv), prog="dynattn pretrain", description=DESCRIPTION)
    try:
        summary = run(arguments)
    except StoppedError:
        raise
    except KeyboardInterrupt as interrupt:
        left = f"{arguments.continuing_command} continues from the newest checkpoint, or begins anew if none was saved"
        raise StoppedError(signal.SIGINT, left) from interrupt
    if is_first_process():
        print(summary)
    return 0


def run(arguments: PretrainArguments) -> str:
    """Makes the run, the runs of a sweep, or the estimate that the arguments ask for; returns the text to print.

    Torch and Transformers are imported only here, so that mistakes in the arguments are reported at once.
    """
    if arguments.dry_run:
        from .dry_run.estimates import dry_run

        return dry_run(arguments)
    if arguments.sweep is not None:
        from .sweep import run_sweep

        return run_sweep(arguments)
    from .job import pretrain

    return pretrain(arguments).summary()


def find_shipped(argv: Sequence[str]) -> list[str]:
    """Replaces the bare name of a shipped recipe by its path, unless the user has a file of that name."""
    argv = name_words(argv, PretrainArguments, 0)
    if not argv or argv[0] not in SHIPPED or Path(argv[0]).exists():
        return argv
    return [str(SHIPPED[argv[0]]), *argv[1:]]
