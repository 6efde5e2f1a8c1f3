"""Megatron's memory maps, written here to the published format, and training in Pythia's order on them."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.indexed import write_indexed
from cases.training import curve, killed_run, run

from dynattn.modeling.ops.chunked_loss import IGNORED
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain.arguments import PretrainArguments
from dynattn.scripts.pretrain.data import indexed
from dynattn.scripts.pretrain.data.documents import load_documents
from dynattn.scripts.pretrain.data.indexed import IndexedSamples, IndexedTokens
from dynattn.scripts.pretrain.data.opening import DataOpener
from dynattn.scripts.pretrain.data.sequences import MixedSequences
from dynattn.scripts.pretrain.data.tokenizer import train_bpe

LENGTH = 32


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe([["one two three four"]], vocab_size=257).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty samples of 33 tokens, all different."""
    rng = np.random.default_rng(0)
    return write_indexed(tmp_path_factory.mktemp("pile") / "document", rng.integers(1, 257, (40, LENGTH + 1)).tolist())


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.int64, np.uint16])
def test_tokens_of_every_type_are_read_back(dtype: Any, tmp_path: Path):
    sequences = [[1, 2, 3], [4], [5, 6, 7, 8]]
    data = IndexedTokens.open(write_indexed(tmp_path / "data", sequences, dtype, documents=[0, 2, 3]))
    parts = np.split(data.tokens, data.begins[1:])
    assert [part.tolist() for part in parts] == sequences
    stream = data.as_stream(range(2))
    assert [part.tolist() for part in np.split(stream.tokens, stream.starts[1:])] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert data.as_stream(range(1, 2)).tokens.tolist() == [5, 6, 7, 8]


def test_a_sample_is_read_and_predicted_token_by_token(samples: Path):
    data = IndexedTokens.open(samples)
    item = IndexedSamples(data, range(5, 40), None, mask_documents=False)[2]  # type: ignore[arg-type]
    expected = data.tokens[7 * (LENGTH + 1) : 8 * (LENGTH + 1)].astype(np.int64)
    assert item["input_ids"].tolist() == expected[:-1].tolist()
    assert item["shift_labels"].tolist() == item["labels"].tolist() == expected[1:].tolist()


def test_samples_claim_no_order_because_a_mixture_shuffles_them(samples: Path):
    alone = IndexedSamples(IndexedTokens.open(samples), range(40), None, mask_documents=False)  # type: ignore[arg-type]
    assert MixedSequences({"pile": alone}).describe() == "pile: 40 samples of 33 tokens from document.idx"


def test_documents_in_a_sample_are_kept_apart_if_asked(tmp_path: Path):
    tokenizer = train_bpe([["x"]], vocab_size=257)
    end = tokenizer.eos_token_id
    data = IndexedTokens.open(write_indexed(tmp_path / "data", [[7, 8, end, 9, 10, 11], [1, 2, 3, 4, 5, end]]))
    first, second = IndexedSamples(data, range(2), tokenizer, mask_documents=True)
    assert first["position_ids"].tolist() == [0, 1, 2, 0, 1]
    assert first["shift_labels"].tolist() == [8, end, IGNORED, 10, 11]
    assert second["position_ids"].tolist() == [0, 1, 2, 3, 4]
    assert second["shift_labels"].tolist() == [2, 3, 4, 5, end]


@pytest.mark.parametrize("mask_documents", [False, True])
@pytest.mark.parametrize("is_cut", [False, True])
def test_bytes_are_those_of_the_targets(is_cut: bool, mask_documents: bool, tmp_path: Path):
    """Every token but the end of a document is one byte here."""
    tokenizer = train_bpe([["x"]], vocab_size=257)
    letters, end = tokenizer.encode("one two three", add_special_tokens=False), tokenizer.eos_token_id
    documents = [[*letters[:size], end] for size in (4, 9, 7, 12)]
    length = 5
    if is_cut:
        stream = [token for document in documents for token in document]
        documents = [stream[at : at + length + 1] for at in range(0, len(stream), length + 1)]
    arguments = PretrainArguments(output="x", sequence_length=length, mask_documents=mask_documents)
    data = IndexedTokens.open(write_indexed(tmp_path / "data", documents))
    sequences = DataOpener(tmp_path, arguments, tokenizer).as_sequences(data, range(4), score_all=True)
    shift = 0 if is_cut else 1  # labels of packed sequences are shifted by the model
    targets = [token for item in sequences for token in item["labels"][shift:].tolist()]
    assert sequences.text_bytes == sum(token not in (end, IGNORED) for token in targets)


def options(samples: Path, tokenizer: Path, **changes: Any) -> dict[str, Any]:
    return {
        "dataset": str(samples), "tokenizer": str(tokenizer), "sequence_length": LENGTH, "mask_documents": False,
        "max_steps": 6, **changes,
    }  # fmt: skip


def test_a_run_continues_its_parents_order_from_any_step(samples: Path, tokenizer: Path, tmp_path: Path):
    """The parent reads four samples an update; its child begins where update 3 of the parent ended."""
    seen: list[list[int]] = []

    class Recorded(IndexedSamples):
        def __getitem__(self, index: int) -> Any:
            seen.append(super().__getitem__(index)["input_ids"].tolist())
            return super().__getitem__(index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dynattn.scripts.pretrain.data.opening.IndexedSamples", Recorded)
        run(tmp_path / "run", samples, **options(samples, tokenizer, skip_sequences=12, max_steps=2, warmup_steps=0))
    rows = IndexedTokens.open(samples).tokens.reshape(40, LENGTH + 1)[:, :-1]
    assert [row for row in seen if row in rows[:36].tolist()] == rows[12:20].tolist()


def test_a_killed_run_on_samples_resumes_to_the_same_curve(samples: Path, tokenizer: Path, tmp_path: Path):
    whole = run(tmp_path / "whole", samples, **options(samples, tokenizer))
    killed_run(tmp_path / "run", samples, 5, **options(samples, tokenizer))
    resumed = run(tmp_path / "run", samples, **options(samples, tokenizer))
    assert curve(resumed.output, "step", "loss") == curve(whole.output, "step", "loss")


def test_documents_of_other_lengths_are_packed(tokenizer: Path, tmp_path: Path):
    rng = np.random.default_rng(1)
    documents = [rng.integers(1, 257, size).tolist() for size in rng.integers(5, 90, 60)]
    source = write_indexed(tmp_path / "data", documents)
    result = run(tmp_path / "run", source, **options(source, tokenizer, mask_documents=True))
    assert result.steps == 6


@pytest.mark.parametrize("packing", ["concatenate", "best_fit", "anchor"])
def test_documents_without_tokens_are_passed_over(packing: Any, tmp_path: Path):
    """Wherever they lie: before, between or behind the others."""
    tokenizer = train_bpe([["x"]], vocab_size=257)
    end = tokenizer.eos_token_id
    filled = [[end, *range(3, 3 + size), end] for size in (4, 9, 1)]
    arguments = PretrainArguments(output="x", sequence_length=8, packing=packing)
    plain, gaps = (
        IndexedTokens.open(write_indexed(tmp_path / name, documents))
        for name, documents in {"plain": filled, "gaps": [[], filled[0], [], [], *filled[1:], []]}.items()
    )
    opener = DataOpener(tmp_path, arguments, tokenizer)
    for score_all in (False, True):
        expected = opener.as_sequences(plain, range(3), score_all=score_all)
        found = opener.as_sequences(gaps, range(7), score_all=score_all)
        assert [*map(str, found)] == [*map(str, expected)]


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize("held_out", [[[]], [[5], [], [6]]])
def test_documents_in_which_nothing_is_predicted_are_refused(held_out: list[list[int]], packing: Any, tmp_path: Path):
    tokenizer = train_bpe([["x"]], vocab_size=257)
    data = IndexedTokens.open(write_indexed(tmp_path / "data", [[1, 2, 3], *held_out]))
    arguments = PretrainArguments(output="x", sequence_length=2, packing=packing)
    opener = DataOpener(tmp_path, arguments, tokenizer)
    for score_all in (False, True):
        with pytest.raises(UserError, match=r"data\.idx holds no token to predict, .*; give longer documents"):
            opener.as_sequences(data, range(1, 1 + len(held_out)), score_all=score_all)


def test_tokens_validate_a_run_on_text(samples: Path, tokenizer: Path, corpus: Path, tmp_path: Path):
    """And none of the text is held out."""
    given = options(
        samples, tokenizer, dataset=str(corpus), validation_dataset=str(samples), max_steps=1, warmup_steps=0
    )
    assert load_documents(PretrainArguments(output="x", **given)).validation is None
    result = run(tmp_path / "run", corpus, **given)
    assert not (result.output / "data" / "validation").exists()
    assert result.validation_targets == 40 * LENGTH


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"carry_memory": True, "mask_documents": False}, r"not tokens that exist already \(tokens\.idx\)"),
        ({"chat_column": "messages", "tokenizer": "x"}, r"tokens\.idx holds tokens, and chat_column=messages"),
    ],
)
def test_what_reads_text_does_not_read_tokens(given: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        PretrainArguments(output="x", dataset="tokens.idx", **given)


def damage(path: Path, kind: str) -> None:
    content = path.read_bytes()
    changes = {
        "magic": b"TNTIDX\x00\x00\x00" + content[9:],
        "version": content[:9] + struct.pack("<Q", 2) + content[17:],
        "dtype": content[:17] + bytes([6]) + content[18:],
        "short": content[:-8],
        "empty": b"",
    }
    path.write_bytes(changes[kind])


@pytest.mark.parametrize(
    ("kind", "message"),
    [("magic", "begins with"), ("version", "version 2"), ("dtype", "data type 6"), ("short", "copy it again"),
     ("empty", "begins with b''")],
)  # fmt: skip
def test_a_wrong_index_is_refused_by_name(kind: str, message: str, tmp_path: Path):
    index = write_indexed(tmp_path / "data", [[1, 2, 3]])
    damage(index, kind)
    with pytest.raises(UserError, match=f"data.idx.*{message}"):
        IndexedTokens.open(index)


@pytest.mark.parametrize(
    ("array", "entry", "value", "message"),
    [
        ("pointers", 0, 1, "first sequence begins at byte 1"),
        ("pointers", 1, 7, "among its sequences 0 to 2 one does not end where the next begins"),
        ("sizes", 1, -3, "among its sequences"),
        ("sizes", 2, -3, "among its sequences"),
        ("documents", 3, 10**6, "documents are not ranges of its 3 sequences"),
        ("documents", 0, -1, "documents are not ranges"),
        ("documents", 1, 3, "documents are not ranges"),
    ],
)
@pytest.mark.parametrize("block", [2, 1 << 20])
def test_a_damaged_index_is_refused(
    array: str, entry: int, value: int, message: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    index = write_indexed(tmp_path / "data", [[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    monkeypatch.setattr(indexed, "BLOCK", block)
    places = {"sizes": (np.int32, 34), "pointers": (np.int64, 34 + 4 * 3), "documents": (np.int64, 34 + 12 * 3)}
    dtype, first = places[array]
    raw = bytearray(index.read_bytes())
    np.frombuffer(raw, dtype, entry + 1, first)[entry] = value
    index.write_bytes(raw)
    with pytest.raises(UserError, match=message if block > 3 else message.replace("0 to 2", "[01] to [12]")):
        IndexedTokens.open(index)


def test_negative_tokens_are_refused(samples: Path, tokenizer: Path, tmp_path: Path):
    negative = write_indexed(tmp_path / "negative", [[5] * LENGTH + [-7]] * 4, dtype=np.int32)
    with pytest.raises(UserError, match="holds the token -7, and the tokenizer has 257"):
        run(tmp_path / "run", negative, **options(negative, tokenizer))


def test_tokens_that_are_missing_or_of_another_tokenizer_are_refused(samples: Path, tokenizer: Path, tmp_path: Path):
    index = write_indexed(tmp_path / "data", [[1, 2, 3], [4, 5, 6]])
    index.with_suffix(".bin").write_bytes(b"\x01\x00")
    with pytest.raises(UserError, match=r"data\.bin has 2 bytes, and data\.idx describes 12"):
        IndexedTokens.open(index)
    index.with_suffix(".bin").unlink()
    with pytest.raises(UserError, match="there is no file"):
        IndexedTokens.open(index)
    big = write_indexed(tmp_path / "big", [[40_000] * (LENGTH + 1)] * 4)
    with pytest.raises(UserError, match="holds the token 40000, and the tokenizer has 257"):
        run(tmp_path / "run", big, **options(big, tokenizer))
    alone = write_indexed(tmp_path / "alone", [[5] * (LENGTH + 1)])
    with pytest.raises(UserError, match=r"alone\.idx has 1 samples or documents, and one must be held out"):
        run(tmp_path / "run", alone, **options(alone, tokenizer))
    with pytest.raises(UserError, match="set it to 32"):
        run(tmp_path / "run", samples, **options(samples, tokenizer, sequence_length=16))
    with pytest.raises(UserError, match="name the tokenizer that made them"):
        run(tmp_path / "run", samples, **options(samples, tokenizer) | {"tokenizer": "bpe"})
