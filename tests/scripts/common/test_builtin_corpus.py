"""The corpus inside CPython, in two splits."""

import pytest

from dynattn.scripts.common.builtin_corpus import builtin_documents


def test_the_builtin_corpus_holds_out_a_tenth_without_overlap() -> None:
    train, validation = builtin_documents("train"), builtin_documents("validation")
    sizes = [sum(map(len, documents)) for documents in (train, validation)]
    assert 0.05 < sizes[1] / sum(sizes) < 0.12
    assert sizes[0] > 200_000
    seen = {" ".join(p.split()) for document in train for p in document.split("\n\n")}
    assert not seen & {" ".join(p.split()) for document in validation for p in document.split("\n\n")}
    assert builtin_documents("train") == train
    with pytest.raises(ValueError, match="has the splits"):
        builtin_documents("test")  # type: ignore[arg-type]
