"""Help and mistyped options answer at once: the command line imports heavy libraries only when a job starts."""

import json
import subprocess
import sys
from typing import Any

import pytest

from dynattn.scripts.cli import JOBS
from dynattn.scripts.convert.main import CONVERSIONS
from dynattn.scripts.reproduce.main import STUDIES

HEAVY = ("torch", "transformers", "safetensors", "tokenizers", "numpy", "datasets", "accelerate", "evaluate")
HEAVY += ("lm_eval", "matplotlib")
COMMANDS = [
    *([job] for job in JOBS.commands),
    *(["convert", conversion] for conversion in CONVERSIONS.commands),
    *(["reproduce", study] for study in STUDIES.commands),
]
# These have options of their own; convert and reproduce only choose what has, lm-eval and serve hand theirs on.
WITHOUT_OPTIONS = (["convert"], ["reproduce"], ["lm-eval"], ["serve"])
LINES = {
    ("--help",): 0,
    (): 2,
    ("trian",): 2,
    ("reproduce", "tiny-shakespeare"): 2,  # lacks --data
    **{(*command, "--help"): 0 for command in COMMANDS},
    **{(*command, "--no_such_option", "1"): 2 for command in COMMANDS if command not in WITHOUT_OPTIONS},
}
# The help of `dynattn lm-eval` imports lm_eval. One process answers all lines; this one comes last, so that no other
# line finds lm_eval imported.
OWN_HELP = ("lm-eval", "--help")
PROGRAM = f"""
import contextlib, io, json, sys
from dynattn.scripts.cli import main
for line in json.loads(sys.argv[1]):
    before = set(sys.modules)
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()):
        try:
            status = main(line)
        except SystemExit as ended:
            status = ended.code
    print(json.dumps([status, sorted(set({HEAVY}) & sys.modules.keys() - before), "usage:" in output.getvalue()]))
"""


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, ...], list[Any]]:
    """Of each command line the exit status, the heavy libraries that it imported, and whether it showed the usage."""
    lines = sorted(LINES, key=lambda line: line == OWN_HELP)
    command = [sys.executable, "-c", PROGRAM, json.dumps(lines)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(zip(lines, map(json.loads, finished.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_help_and_mistakes_are_light(line: tuple[str, ...], answers: dict[tuple[str, ...], list[Any]]) -> None:
    imported = ["lm_eval", "numpy"] if line == OWN_HELP else []
    assert answers[line] == [LINES[line], imported, line == () or "--help" in line]
