"""What the tests of evaluations share: held-out documents of which only the beginnings are scored."""

from functools import cache

import pytest

from dynattn.scripts.common.builtin_corpus import builtin_documents
from dynattn.scripts.evaluate import harness, heldout


@cache
def beginnings(split: str) -> list[str]:
    """Some windows of each document."""
    return [document[:1200] for document in builtin_documents(split)]


@pytest.fixture(autouse=True)
def held_out(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The documents that are scored."""
    for module in (harness, heldout):
        monkeypatch.setattr(module, "builtin_documents", beginnings)
    return beginnings("validation")
