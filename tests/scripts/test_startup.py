"""Help and mistyped options answer at once: the command line imports heavy libraries only when a job starts."""

import json
import subprocess
import sys

import pytest

from dynattn.scripts.cli import JOBS
from dynattn.scripts.convert.main import CONVERSIONS
from dynattn.scripts.reproduce.main import STUDIES

HEAVY = ("torch", "transformers", "datasets", "accelerate", "evaluate", "lm_eval", "matplotlib")
PROGRAM = f"""
import contextlib, io, json, sys
from dynattn.scripts.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    try:
        status = main(sys.argv[1:])
    except SystemExit as ended:
        status = ended.code
print(json.dumps([status, [name for name in {HEAVY} if name in sys.modules]]))
"""
COMMANDS = [
    *([job] for job in JOBS.commands),
    *(["convert", conversion] for conversion in CONVERSIONS.commands),
    *(["reproduce", study] for study in STUDIES.commands),
]
# These have options of their own; convert and reproduce only choose what has, lm-eval and serve hand theirs on.
WITHOUT_OPTIONS = (["convert"], ["reproduce"], ["lm-eval"], ["serve"])
WITH_OPTIONS = [command for command in COMMANDS if command not in WITHOUT_OPTIONS]


def run(*arguments: str) -> tuple[int, list[str]]:
    """The exit status of a command and the heavy libraries that it imported; lm_eval's own help needs lm_eval."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    status, imported = json.loads(finished.stdout)
    own = ["lm_eval"] if arguments[:1] == ("lm-eval",) else []
    return status, [name for name in imported if name not in own]


@pytest.mark.parametrize("arguments", [["--help"], [], ["trian"]], ids=" ".join)
def test_the_list_of_jobs_is_light(arguments: list[str]) -> None:
    assert run(*arguments) == (0 if arguments == ["--help"] else 2, [])


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_is_light(command: list[str]) -> None:
    assert run(*command, "--help") == (0, [])


@pytest.mark.parametrize("command", WITH_OPTIONS, ids=" ".join)
def test_a_mistyped_option_is_refused_lightly(command: list[str]) -> None:
    assert run(*command, "--no_such_option", "1") == (2, [])
