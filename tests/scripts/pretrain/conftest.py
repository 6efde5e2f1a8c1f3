"""The text that most runs here train on."""

from pathlib import Path

import pytest
from cases.training import write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten sequences of 32 tokens, so that updates of four sequences cross the end of an epoch."""
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus.jsonl")
