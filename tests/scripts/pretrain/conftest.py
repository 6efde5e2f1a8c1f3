"""The text that most runs here train on, a run that ended and one that was killed."""

from pathlib import Path

import pytest
from cases.training import killed_run, run, write_corpus

from dynattn.scripts.pretrain import Result


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten sequences of 32 tokens, so that updates of four sequences cross the end of an epoch."""
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus.jsonl")


@pytest.fixture(scope="session")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run of twelve updates, with a checkpoint after every fourth."""
    return run(tmp_path_factory.mktemp("runs") / "straight", corpus)


@pytest.fixture(scope="session")
def interrupted(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of such a run that was killed after ten updates."""
    output = tmp_path_factory.mktemp("runs") / "interrupted"
    killed_run(output, corpus, 10)
    return output
