"""The `dynattn` command with less training and fewer questions, so that tests run commands of guides as they stand."""

import sys

from dynattn.scripts.cli import main

MOST_UPDATES = 44  # the recipes' warm-ups have up to 40
SEQUENCES = 2
QUESTIONS = 4


def shortened(argv: list[str]) -> list[str]:
    """The same command, with at most `MOST_UPDATES` updates of few sequences, and `QUESTIONS` of each task."""
    if argv[:1] == ["evaluate"]:
        return [*argv, "--limit", str(QUESTIONS)]
    if argv[:1] != ["pretrain"] or "--dry_run" in argv:
        return argv
    given = int(argv[argv.index("--max_steps") + 1]) if "--max_steps" in argv else MOST_UPDATES
    # A size of the batch that is named matters to the page: a run that goes on keeps it.
    sequences = [] if "--batch_size" in argv else ["--batch_size", str(SEQUENCES)]
    return [*argv, "--max_steps", str(min(given, MOST_UPDATES)), *sequences]


if __name__ == "__main__":
    sys.exit(main(shortened(sys.argv[1:])))
