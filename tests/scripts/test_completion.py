"""Completion offers what the help texts list, and a real shell completes with it."""

import shlex
import subprocess
import sys

import pytest

from dynattn.scripts import cli
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.completion import SHELLS, following, main
from dynattn.scripts.convert.main import CONVERSIONS


def test_jobs_conversions_and_options_follow() -> None:
    assert following([]) == list(cli.JOBS.commands)
    assert following(["convert"]) == list(CONVERSIONS.commands)
    assert {"--max_steps", "--output", "--help", "--import"} <= set(following(["pretrain", "tiny.yaml", "--seed", "3"]))
    assert "--reverse" in following(["convert", "official", "source", "destination"])
    assert following(["--import", "module", "convert"]) == list(CONVERSIONS.commands)
    assert following(["lm-eval"]) == []
    assert following(["trian"]) == list(cli.JOBS.commands)


def test_the_function_of_bash_completes() -> None:
    program = f"""
dynattn() {{ {shlex.quote(sys.executable)} -m dynattn "$@"; }}
eval "$(dynattn completion bash)"
COMP_WORDS=(dynattn convert o) COMP_CWORD=2; _dynattn; echo "${{COMPREPLY[@]}}"
COMP_WORDS=(dynattn publish --dry) COMP_CWORD=2; _dynattn; echo "${{COMPREPLY[@]}}"
"""
    shown = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True).stdout
    assert shown == "official olmo\n--dry_run\n"


def test_shells_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in SHELLS:
        assert main([shell]) == 0
        assert "dynattn completion --words" in capsys.readouterr().out
    with pytest.raises(UserError, match="unknown shell 'csh'; choose from bash, zsh, fish"):
        main(["csh"])
