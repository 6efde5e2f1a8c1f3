"""Commands of other packages know the models of this one, in every Python process that they start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynattn.scripts.cli import main

KNOWS = "from transformers import AutoConfig; print(type(AutoConfig.for_model('dcformer')).__name__)"


def run(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What `dynattn run` does with a command."""
    command = [sys.executable, "-m", "dynattn", "run", *words]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True)


def test_processes_of_a_command_know_the_models(tmp_path: Path) -> None:
    child = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {KNOWS!r}]).returncode)"
    ended = run("python", "-c", child, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "DCFormerConfig\n"), ended.stderr


def test_they_import_the_modules_of_the_user_and_run_what_python_would_have_run(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('hidden')")
    (tmp_path / "mine.py").write_text("print('mine')")
    (tmp_path / "script.py").write_text("import sys; print('dynattn' in sys.modules)")
    ended = run("--import", "mine", "python", "script.py", cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    # This process runs the hidden one, too, and imports the module before the command does.
    assert ended.stdout.splitlines()[-3:] == ["hidden", "mine", "True"], ended.stderr


def test_a_command_keeps_its_exit_status(tmp_path: Path) -> None:
    assert run("python", "-c", "import sys; sys.exit(7)", cwd=tmp_path).returncode == 7


def test_a_command_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "no-such-command"]) == 2
    assert "dynattn run: error: there is no command 'no-such-command' in " in capsys.readouterr().err
