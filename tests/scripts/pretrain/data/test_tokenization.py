"""Tokenizing once: in processes, from where it was interrupted, and shared by runs."""

import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.training import curve, run
from datasets import Dataset

from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain.data import documents, token_cache, tokenization
from dynattn.scripts.pretrain.data.text_encoder import Encoded, TextEncoder
from dynattn.scripts.pretrain.data.token_cache import write_cached
from dynattn.scripts.pretrain.data.token_stream import TokenStream
from dynattn.scripts.pretrain.data.tokenization import encode_batches, write_stream
from dynattn.scripts.pretrain.data.tokenizer import train_bpe

TEXTS = [f"document {number} says {'x' * (number % 7)}" for number in range(57)]
DATASET = Dataset.from_dict({"text": TEXTS})
IDENTITY = {"documents": "a", "tokenizer": "b"}


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> TextEncoder:
    """An encoder, with batches of five documents and a note after every ten."""
    monkeypatch.setattr(documents, "BATCH_DOCUMENTS", 5)
    monkeypatch.setattr(tokenization, "NOTE_DOCUMENTS", 10)
    return TextEncoder(train_bpe([TEXTS], vocab_size=300))


class Interrupted(TextEncoder):
    """Fails after some batches, and counts them."""

    def __init__(self, encoder: TextEncoder, batches: int) -> None:
        super().__init__(encoder.tokenizer)
        self.inner, self.left = encoder, batches

    def __call__(self, documents: list[str]) -> Encoded:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return self.inner(documents)


def content(folder: Path) -> Iterator[bytes]:
    """All that a complete stream consists of."""
    return (path.read_bytes() for path in sorted(folder.iterdir()))


@pytest.mark.parametrize("batches", [0, 1, 3, 8, 11])
def test_interrupted_tokenizing_goes_on_to_the_same_stream(batches: int, encoder: TextEncoder, tmp_path: Path):
    write_stream(DATASET, encoder, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        write_stream(DATASET, Interrupted(encoder, batches), tmp_path / "resumed")
    rest = Interrupted(encoder, 12 - batches // 2 * 2)
    write_stream(DATASET, rest, tmp_path / "resumed")
    assert rest.left == 0
    assert list(content(tmp_path / "resumed")) == list(content(tmp_path / "whole"))


class Marking(TextEncoder):
    """All tokens are targets, and it says so."""

    marks_targets = True

    def __call__(self, documents: list[str]) -> Encoded:
        encoded = super().__call__(documents)
        return replace(encoded, targets=np.ones(len(encoded.tokens), dtype=bool))


@pytest.mark.parametrize("name", ["tokens.bin", "targets.bin"])
def test_what_was_lost_with_a_crash_is_made_again(name: str, encoder: TextEncoder, tmp_path: Path):
    marking, interrupted = Marking(encoder.tokenizer), Interrupted(Marking(encoder.tokenizer), 8)
    interrupted.marks_targets = True
    write_stream(DATASET, marking, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        write_stream(DATASET, interrupted, tmp_path / "resumed")
    with (tmp_path / "resumed" / name).open("r+b") as file:
        file.truncate(8)
    write_stream(DATASET, marking, tmp_path / "resumed")
    assert list(content(tmp_path / "resumed")) == list(content(tmp_path / "whole"))


@pytest.mark.slow
def test_processes_make_the_same_tokens_in_the_same_order(encoder: TextEncoder):
    ours, theirs = (list(encode_batches(documents.iterate_texts(DATASET), encoder, workers)) for workers in (2, 0))
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.slow
def test_a_signal_does_not_end_a_process_that_is_being_started(encoder: TextEncoder, capfd: pytest.CaptureFixture[str]):
    def texts() -> Iterator[list[str]]:
        yield ["one"]
        (started,) = multiprocessing.active_children()
        os.kill(started.pid or 0, signal.SIGINT)
        yield ["two"]

    assert len(list(encode_batches(texts(), encoder, workers=1))) == 2
    assert "Traceback" not in capfd.readouterr().err


def test_a_cache_tokenizes_once_and_shares_the_files(encoder: TextEncoder, tmp_path: Path):
    cache = tmp_path / "cache"
    write_cached(DATASET, encoder, tmp_path / "one", cache=cache, workers=0, identity=IDENTITY)
    nothing = Interrupted(encoder, 0)
    write_cached(DATASET, nothing, tmp_path / "two", cache=cache, workers=0, identity=IDENTITY)
    assert list(content(tmp_path / "one")) == list(content(tmp_path / "two"))
    assert (tmp_path / "one" / "tokens.bin").samefile(tmp_path / "two" / "tokens.bin")
    assert TokenStream.open(tmp_path / "two").text_bytes == sum(map(len, TEXTS))
    with pytest.raises(KeyboardInterrupt):
        write_cached(
            DATASET, nothing, tmp_path / "three", cache=cache, workers=0, identity={**IDENTITY, "tokenizer": "c"}
        )


def test_a_cache_entry_that_was_interrupted_is_continued(encoder: TextEncoder, tmp_path: Path):
    for batches in (8, 4):
        half = Interrupted(encoder, batches)
        if batches == 8:
            with pytest.raises(KeyboardInterrupt):
                write_cached(DATASET, half, tmp_path / "one", cache=tmp_path / "c", workers=0, identity=IDENTITY)
        else:
            write_cached(DATASET, half, tmp_path / "one", cache=tmp_path / "c", workers=0, identity=IDENTITY)
            assert half.left == 0


def test_a_cache_entry_that_was_interrupted_before_it_was_moved_is_finished(
    encoder: TextEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupt(partial: Path, entry: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(token_cache, "put_in_place", interrupt)
        write_cached(DATASET, encoder, tmp_path / "one", cache=tmp_path / "c", workers=0, identity=IDENTITY)
    write_cached(DATASET, encoder, tmp_path / "one", cache=tmp_path / "c", workers=0, identity=IDENTITY)
    write_cached(DATASET, encoder, tmp_path / "two", cache=tmp_path / "c", workers=0, identity=IDENTITY)
    assert list(content(tmp_path / "one")) == list(content(tmp_path / "two"))


@pytest.mark.parametrize(
    ("file", "message"),
    [("tokens.bin", "tokens.bin does not have the contents"), ("stream.json", "tokenizer other instead of b")],
)
def test_a_damaged_or_foreign_cache_entry_is_refused(file: str, message: str, encoder: TextEncoder, tmp_path: Path):
    write_cached(DATASET, encoder, tmp_path / "one", cache=tmp_path / "c", workers=0, identity=IDENTITY)
    (entry,) = (tmp_path / "c").iterdir()
    if file == "stream.json":
        stored = json.loads((entry / file).read_text())
        (entry / file).write_text(json.dumps({**stored, "tokenizer": "other"}))
        (entry / "files.json").write_text("{}")
    else:
        (entry / file).write_bytes(bytes(reversed((entry / file).read_bytes())))
    with pytest.raises(UserError, match=f"{message}.*delete that folder"):
        write_cached(DATASET, encoder, tmp_path / "two", cache=tmp_path / "c", workers=0, identity=IDENTITY)


def test_a_refused_run_with_its_cache_in_its_folder_can_be_repeated(corpus: Path, tmp_path: Path):
    output = tmp_path / "run"
    options: dict[str, Any] = {"max_steps": 3, "warmup_steps": 0, "token_cache": str(output / "caches" / "tokens")}
    with pytest.raises(UserError, match="fewer than one sequence of sequence_length=2000"):
        run(output, corpus, sequence_length=2000, **options)
    assert [entry.name for entry in output.iterdir()] == ["caches"]
    assert run(output, corpus, **options).steps == 3


def test_runs_with_and_without_a_cache_are_the_same(corpus: Path, tmp_path: Path):
    cache = str(tmp_path / "cache")
    results = [
        run(tmp_path / name, corpus, max_steps=3, warmup_steps=0, token_cache=used)
        for name, used in (("a", None), ("b", cache), ("c", cache))
    ]
    assert len({str(curve(result.output, "step", "loss")) for result in results}) == 1
    assert len(list(Path(cache).iterdir())) == 2
