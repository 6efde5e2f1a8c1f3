"""Writes the curves of one or several runs as one HTML page.

    dynattn report RUN [RUN ...] [--output FILE.html]

RUN is the output folder of `dynattn pretrain`, finished or not. The page is one file and opens without a network. By
default it is report.html in the folder of the first run.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from ..common.errors import UserError
from ..common.option_values import with_home

DESCRIPTION = "Write the curves of one or several runs as one HTML page."


def path_of(text: str) -> Path:
    """The path that an option or a word means."""
    return Path(with_home(text))


def main(argv: Sequence[str]) -> int:
    """Writes the page and returns the exit status."""
    parser = ArgumentParser(prog="dynattn report", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=path_of, metavar="RUN", help="output folder of a run")
    parser.add_argument(
        "--output", type=path_of, default=None, help="file to write (default: report.html in the first run)"
    )
    options = parser.parse_args(argv)
    from .page import write_page  # here, because it imports Matplotlib, and help needs to be fast
    from .run import read_runs

    output = options.output or options.runs[0] / "report.html"
    try:
        runs = read_runs(options.runs)
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}; leave this run out, or mend it") from error
    try:
        write_page(runs, output)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}; give another file with --output") from error
    print(f"wrote {output}")
    return 0
