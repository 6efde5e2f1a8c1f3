"""Documents from files, folders and globs, held-out documents, and data that cannot be used."""

import errno
import json
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases.training import killed_run, run
from datasets import Dataset, IterableDataset

from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain import PretrainArguments
from dynattn.scripts.pretrain.data import documents
from dynattn.scripts.pretrain.data.digests import digest
from dynattn.scripts.pretrain.data.documents import (
    check_splits,
    cut_tail,
    describe_sources,
    hold_out,
    is_hub_name,
    load_documents,
    load_stream,
    load_text,
)
from dynattn.scripts.pretrain.data.duplicates import warn_of_copies
from dynattn.scripts.pretrain.data.streaming import split_stream


def test_held_out_documents_are_not_training_documents():
    dataset = Dataset.from_dict({"text": [f"document {number}" for number in range(50)]})
    train, validation = hold_out(dataset, share=0.1, divisible=False)
    assert len(validation["text"]) == 5
    assert sorted([*train["text"], *validation["text"]]) == sorted(dataset["text"])


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_both_splits_get_a_document(share: float):
    train, validation = hold_out(Dataset.from_dict({"text": ["a", "b", "c"]}), share, divisible=True)
    assert min(len(train), len(validation)) >= 1


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_text_of_every_type_of_arrow_is_read(kind: pa.DataType, tmp_path: Path):
    texts = ["one", None, "two\u2028\0"]
    pq.write_table(pa.table({"text": pa.array(texts, kind)}), tmp_path / "data.parquet")
    read = load_text(str(tmp_path), PretrainArguments(output="unused"), "train")
    assert list(read["text"]) == ["one", texts[-1]]
    assert read.features["text"].dtype == "string"


def test_copies_in_and_across_splits_are_counted(caplog: pytest.LogCaptureFixture):
    train = digest(Dataset.from_dict({"text": ["a", "b", "a", "c", "a"]}))
    warn_of_copies({"train": train}, digest(Dataset.from_dict({"text": ["a", "d", "b"]})))
    assert [record.message for record in caplog.records] == [
        "2 of the 5 training documents are copies of others; was a file given twice?",
        "2 of the 3 validation documents are also training documents, so the validation loss is too low; remove the "
        "copies, or name other validation data",
    ]
    caplog.clear()
    warn_of_copies({"train": train}, digest(Dataset.from_dict({"text": ["d", "e", "d"]})))
    assert "1 of the 3 validation documents are copies" in caplog.messages[-1]
    caplog.clear()
    apart, held_out = (digest(Dataset.from_dict({"text": texts})) for texts in (["a", "b"], ["c"]))
    warn_of_copies({"train": apart}, held_out)
    assert not caplog.records


def test_a_single_document_is_cut_after_a_line():
    text = "".join(f"line {number}\n" for number in range(100))
    head, tail = cut_tail(text, share=0.2)
    assert head + tail == text
    assert head.endswith("\n")
    assert 0.15 < len(tail) / len(text) <= 0.2
    assert cut_tail("x" * 100, share=0.2) == ("x" * 80, "x" * 20)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_local_files_folders_and_globs_hold_the_same_documents(tmp_path: Path, suffix: str):
    documents = [f"document {number}\nwith two lines" for number in range(4)]
    folder = tmp_path / "data [v2]"
    folder.mkdir()
    for part in (0, 1):
        chosen = Dataset.from_dict({"body": [*documents[2 * part : 2 * part + 2], "  ", None]})
        if suffix == ".txt":
            for number, text in enumerate(filter(None, chosen["body"])):
                (folder / f"{part}-{number}.txt").write_text(text)
        elif suffix == ".jsonl":
            chosen.to_json(folder / f"{part}.jsonl")
        else:
            chosen.to_parquet(folder / f"{part}.parquet")
    for source in (folder, folder / f"*{suffix}"):
        column = "text" if suffix == ".txt" else "body"
        loaded = load_documents(PretrainArguments(output="x", dataset=str(source), text_column=column))
        assert sorted([*loaded.train["train"]["text"], *loaded.validation["text"]]) == documents
        assert loaded.train["train"].column_names == ["text"]
        streamed = load_stream(str(source), PretrainArguments(output="x", text_column=column))
        assert sorted(row["text"] for row in streamed) == documents


def test_a_dataset_of_the_hub_is_streamed(monkeypatch: pytest.MonkeyPatch):
    """Some datasets do not tell their columns before they are read."""
    rows = [{"text": "a", "number": 1}, {"text": " ", "number": 2}]
    load, arguments = Mock(), PretrainArguments(output="x", dataset_config="en")
    monkeypatch.setattr(documents, "load_dataset", load)
    for stream in (Dataset.from_list(rows).to_iterable_dataset(), IterableDataset.from_generator(lambda: iter(rows))):
        load.return_value = stream
        assert [row["text"] for row in load_stream("owner/name", arguments)] == ["a"]
    load.assert_called_with("owner/name", "en", split="train", streaming=True)
    load.return_value = Dataset.from_list(rows).to_iterable_dataset()
    with pytest.raises(UserError, match=r"owner/name has no column 'body', only \['text', 'number'\]"):
        load_stream("owner/name", PretrainArguments(output="x", text_column="body"))


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"text {number}", encoding="utf-8-sig")
    loaded = load_documents(PretrainArguments(output="x", dataset=str(tmp_path)))
    assert sorted([*loaded.train["train"]["text"], *loaded.validation["text"]]) == ["text 0", "text 1", "text 2"]


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_file_with_new_text_and_its_old_time_is_read_anew(suffix: str, tmp_path: Path):
    """`rsync` and `tar` keep the time of a file, by which the cache of datasets recognizes it."""
    file, found = tmp_path / f"data{suffix}", []
    for text in ("the first", "another text", "as long text"):
        file.write_text(json.dumps({"text": text}) if suffix == ".jsonl" else text)
        os.utime(file, (1e9, 1e9))
        found += load_text(str(file), PretrainArguments(output="x"), "train")["text"]
    assert found == ["the first", "another text", "as long text"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_text_that_is_no_utf8_is_refused(suffix: str, tmp_path: Path):
    """The libraries that read these files do not look at the text."""
    file = tmp_path / f"data{suffix}"
    if suffix == ".jsonl":
        file.write_bytes(b'{"text": "\xff"}')
    else:
        broken = pa.array([b"\xff"]).view(pa.string())
        pq.write_table(pa.table({"text": broken}), file)
    with pytest.raises(UserError, match=rf"cannot read the text of .*data\{suffix}: .*utf-8"):
        load_text(str(file), PretrainArguments(output="x"), "train")


def test_a_folder_of_texts_may_hold_the_output(corpus: Path, tmp_path: Path):
    shutil.copy(corpus, tmp_path / "corpus.jsonl")
    killed_run(tmp_path / "run", tmp_path, 5)
    assert run(tmp_path / "run", tmp_path).steps == 12


def test_named_validation_data_is_used(tmp_path: Path):
    (tmp_path / "a.txt").write_text("training text")
    (tmp_path / "b.txt").write_text("other text")
    arguments = PretrainArguments(
        output="x", dataset=str(tmp_path / "a.txt"), validation_dataset=str(tmp_path / "b.txt")
    )
    loaded = load_documents(arguments)
    assert (loaded.train["train"]["text"][:], loaded.validation["text"][:]) == (["training text"], ["other text"])
    assert describe_sources(arguments) == "a.txt"


def test_a_file_that_is_gone_is_no_dataset_of_the_hub(tmp_path: Path):
    assert is_hub_name("owner/name")
    assert not any(map(is_hub_name, ("builtin", str(tmp_path / "gone.txt"), "gone/document.bin")))


def test_rows_without_text_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Rows that have their text in another field would otherwise be missing from the training without a word."""
    rows = [{"text": "a"}, {"body": "b"}, {"text": None}, {"text": " \n"}, {"text": "c"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load_text(str(file), PretrainArguments(output="x", dataset=str(file)), "train")["text"][:] == ["a", "c"]
    assert caplog.messages == [f"3 of 5 documents of {file} hold no text and are left out"]
    caplog.clear()
    file.write_text(json.dumps(rows[0]) + "\n")
    load_text(str(file), PretrainArguments(output="x", dataset=str(file)), "train")
    assert not caplog.messages


def test_data_mistakes_are_told(tmp_path: Path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n ")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "broken.jsonl").write_text('{"text": \n')
    (tmp_path / "good.jsonl").write_text('{"body": "text", "number": 3}\n')
    (tmp_path / "table.csv").write_text("text\na\n")
    (tmp_path / "folder").mkdir()
    mistakes = {
        "missing.txt": "there is no file or folder",
        "empty.txt": "is empty",
        "blank.txt": "holds no text",
        "binary.txt": "cannot read",
        "broken.jsonl": "cannot read",
        "good.jsonl": r"has no column 'text', only \['body', 'number'\]",
        "folder": "holds no file that ends in",
        "table.csv": "ends in none of",
    }
    for name, message in mistakes.items():
        with pytest.raises(UserError, match=message):
            load_documents(PretrainArguments(output="x", dataset=str(tmp_path / name)))
    with pytest.raises(UserError, match=r"holds .*int64.*, not text"):
        load_documents(PretrainArguments(output="x", dataset=str(tmp_path / "good.jsonl"), text_column="number"))
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "mixed" / "b.jsonl").write_text('{"txt": "b"}\n')
    with pytest.raises(UserError, match=r"a.jsonl and 1 more files as json: .*txt.* because column names don't match"):
        load_documents(PretrainArguments(output="x", dataset=str(tmp_path / "mixed")))
    with pytest.raises(UserError, match=r"head of the stream: .*txt.* because column names don't match; check"):
        split_stream(load_stream(str(tmp_path / "mixed"), PretrainArguments(output="x")), None)
    stream = load_stream(str(tmp_path / "good.jsonl"), PretrainArguments(output="x", text_column="number"))
    with pytest.raises(UserError, match=r"the column 'number' of .*good.jsonl holds 3, not text; set text_column"):
        split_stream(stream, None)
    with pytest.raises(UserError, match=r"dataset_config=en is of a Hub dataset, not of .*good\.jsonl"):
        check_splits(PretrainArguments(output="x", dataset=str(tmp_path / "good.jsonl"), dataset_config="en"))
    with pytest.raises(UserError, match="cannot load the split 'train' of the dataset 'no_such_dataset'"):
        load_documents(PretrainArguments(output="x", dataset="no_such_dataset"))


def test_a_cache_that_cannot_be_written_is_told_from_a_file_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "a.txt").write_text("text")
    for path, message in {
        "/cache": "the cache of datasets cannot be written: .*; set HF_HOME",
        "a.txt": "cannot read",
    }.items():
        refused = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / path))
        monkeypatch.setattr(documents, "load_dataset", Mock(side_effect=refused))
        with pytest.raises(UserError, match=message):
            load_text(str(tmp_path / "a.txt"), PretrainArguments(output="x"), "train")
