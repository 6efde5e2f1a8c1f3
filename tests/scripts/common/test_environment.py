"""The commit that runs and records name is that of the code, and studies list what their runs say."""

import subprocess
from pathlib import Path

import pytest

from dynattn.scripts.common import environment

# Without the memory of the first answer, which the tests of one process share.
ask = environment.source_commit.__wrapped__


def test_without_git_the_environment_names_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", run)
    assert ask() is None
    monkeypatch.setenv(environment.COMMIT, "15c7007")
    assert ask() == "15c7007"


def test_changed_code_is_told_beside_the_commit_and_changed_records_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, record = tmp_path / "scripts" / "process.py", tmp_path / "model_cards" / "record.json"
    for file in (source, record):
        file.parent.mkdir()
        file.touch()
    identity = ["-c", "user.name=tests", "-c", "user.email=tests@example.com"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(environment, "__file__", str(source))
    commit = ask()
    assert commit and len(commit) == 40
    record.write_text("{}")
    assert ask() == commit
    source.write_text("changed = True")
    assert ask() == f"{commit}-dirty"


def test_records_list_what_runs_stored_and_older_ones_did_not() -> None:
    runs = [
        {"hardware": "a", "versions": {"torch": "2"}},
        {"hardware": "a", "versions": {}, "commit": "1", "date": "d"},
    ]
    expected = {"hardware": ["a"], "versions": [{"torch": "2"}, {}]}
    assert environment.of_runs(runs) == expected | {"commit": ["not stored", "1"], "date": ["not stored", "d"]}
