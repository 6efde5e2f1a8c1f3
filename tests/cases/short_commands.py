"""The `dynattn` command with fewer updates and questions, so that a test runs commands of guides as they stand."""

import sys

from dynattn.scripts.cli import main

MOST_UPDATES = 40
QUESTIONS = 4


def shortened(argv: list[str]) -> list[str]:
    """The same command, with at most `MOST_UPDATES` updates of a run and `QUESTIONS` of each evaluation task."""
    if argv[:1] == ["evaluate"]:
        return [*argv, "--limit", str(QUESTIONS)]
    if argv[:1] != ["pretrain"] or "--dry_run" in argv:
        return argv
    given = int(argv[argv.index("--max_steps") + 1]) if "--max_steps" in argv else MOST_UPDATES
    return [*argv, "--max_steps", str(min(given, MOST_UPDATES))]


if __name__ == "__main__":
    sys.exit(main(shortened(sys.argv[1:])))
