"""Streams: every token once and in shuffled blocks, resuming from the cursor, errors that reach the training."""

import json
import multiprocessing
import subprocess
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from cases.training import ENVIRONMENT, RUN, command, curve, killed_run, run

from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain import PretrainArguments
from dynattn.scripts.pretrain.data import streaming
from dynattn.scripts.pretrain.data.preparation import prepare
from dynattn.scripts.pretrain.data.stream_blocks import (
    FAILURE,
    Block,
    block_path,
    check_failure,
    written_blocks,
)
from dynattn.scripts.pretrain.data.streaming import BlockWriter, StreamOrder
from dynattn.scripts.pretrain.data.text_encoder import TextEncoder
from dynattn.scripts.pretrain.data.tokenizer import load_tokenizer, train_bpe
from dynattn.scripts.pretrain.outputs.run_folder import RunFolder

LENGTH = 32


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files with 450 documents, one of which is empty, and held-out text."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(3):
        texts = (
            f"The number {n} is followed by {n + 1}. " * (1 + n % 4) for n in range(150 * shard, 150 * (shard + 1))
        )
        (folder / f"{shard}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (folder / "3.jsonl").touch()
    return folder


@pytest.fixture(scope="module")
def options(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("held-out")
    (folder / "text.txt").write_text("The number 7 is followed by 8. " * 20)
    train_bpe([["The number 7 is followed by 8."]], vocab_size=280).save_pretrained(folder / "tokenizer")
    return {
        "dataset": str(shards), "validation_dataset": str(folder / "text.txt"), "streaming": True, "shuffle_buffer": 16,
        "tokenizer": str(folder / "tokenizer"), "sequence_length": LENGTH,
    }  # fmt: skip


def writer(options: dict[str, Any], output: Path) -> BlockWriter:
    arguments = PretrainArguments(output=str(output), max_steps=1, **options)
    return BlockWriter(arguments, RunFolder(output), load_tokenizer(options["tokenizer"]), global_batch=4)


def take(blocks: Any, count: int) -> list[Block]:
    return [next(blocks) for _ in range(count)]


def test_blocks_hold_the_documents_one_after_the_other(options: dict[str, Any], shards: Path, tmp_path: Path):
    made = writer(options, tmp_path)
    blocks = take(made._blocks(None), 60)
    texts = [json.loads(line)["text"] for n in range(3) for line in (shards / f"{n}.jsonl").read_text().splitlines()]
    encoded = TextEncoder(load_tokenizer(options["tokenizer"]))(texts)
    tokens = np.concatenate([block.tokens.ravel() for block in blocks])
    once = min(len(tokens), len(encoded.tokens))
    assert len(tokens) > len(encoded.tokens)
    assert (tokens[:once] == encoded.tokens[:once]).all()
    assert (tokens[once:] == encoded.tokens[: len(tokens) - once]).all()
    starts = np.flatnonzero(np.concatenate([block.starts.ravel() for block in blocks]))
    assert (starts[: len(texts)] == np.cumsum(encoded.lengths) - encoded.lengths).all()


@pytest.mark.parametrize("after", [1, 7, 40])
def test_the_cursor_of_a_block_leads_to_the_next(after: int, options: dict[str, Any], tmp_path: Path):
    expected = take(writer(options, tmp_path)._blocks(None), after + 3)
    expected[after - 1].save(tmp_path / "block")
    resumed = take(writer(options, tmp_path)._blocks(Block.load(tmp_path / "block")), 3)
    for ours, theirs in zip(resumed, expected[after:], strict=True):
        assert (ours.tokens == theirs.tokens).all()
        assert (ours.starts == theirs.starts).all()


@pytest.mark.slow
def test_processes_that_tokenize_make_the_blocks_and_cursors_of_one(options: dict[str, Any], tmp_path: Path):
    """From the start and from a cursor, and over the end of the stream, where it begins again."""
    alone, several = (writer({**options, "tokenizer_workers": count}, tmp_path) for count in (0, 2))
    for previous in (None, take(alone._blocks(None), 7)[6]):
        made, expected = (take(made_by._blocks(previous), 60) for made_by in (several, alone))
        for ours, theirs in zip(made, expected, strict=True):
            assert ours.cursor == theirs.cursor
            for name in ("tokens", "starts", "targets", "rest"):
                assert (getattr(ours, name) == getattr(theirs, name)).all()


def test_a_run_on_a_stream_lets_the_reading_process_end(
    options: dict[str, Any], shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One that is killed leaves semaphores behind, which Python reports as leaked. Here it is forked, to be quick."""

    def watch(self: BlockWriter, process: BaseProcess, finished: threading.Event) -> None:
        process.join()
        statuses.append(process.exitcode)

    statuses: list[int | None] = []
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: fork)
    monkeypatch.setattr(streaming, "SECONDS_TO_END", 60)
    monkeypatch.setattr(BlockWriter, "tell_if_it_dies", watch)
    assert run(tmp_path / "run", shards, **options, max_steps=2, warmup_steps=1).steps == 2
    assert statuses == [0]
    assert max(written_blocks(tmp_path / "run" / "data" / "stream")) <= streaming.BLOCKS_AHEAD


@pytest.mark.parametrize("fails", [False, True])
def test_a_reading_process_whose_run_was_killed_writes_nothing_more(
    fails: bool, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The run that was killed ended while a block was read, and another one may have its folder by now."""
    made = writer(options, tmp_path)

    def read(previous: Block | None) -> Iterator[Block]:
        monkeypatch.setattr(streaming.os, "getppid", lambda: 1)
        if fails:
            raise OSError("the folder is gone")
        yield from BlockWriter._blocks(made, previous)

    monkeypatch.setattr(made, "_blocks", read)
    monkeypatch.setattr(streaming, "ignore_signals", lambda: None)
    made.run(SimpleNamespace(value=0))
    assert not list(made.folder.iterdir())


def test_what_ended_an_earlier_reading_process_does_not_end_the_next(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: fork)
    arguments = PretrainArguments(output=str(tmp_path), max_steps=1, **options)
    order = StreamOrder(arguments, RunFolder(tmp_path), load_tokenizer(options["tokenizer"]), global_batch=4)
    order.writer.folder.mkdir(parents=True)
    (order.writer.folder / FAILURE).write_text('{"error": "the disk was full"}')
    with order.feeding(is_main=True):
        check_failure(order.writer.folder)


@pytest.mark.slow
def test_a_killed_run_leaves_no_process_that_reads(options: dict[str, Any], shards: Path, tmp_path: Path):
    settings = {**RUN, **options, "tokenizer_workers": 2, "max_steps": 4000, "output": tmp_path / "run"}
    process = psutil.Popen(command(settings), env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(members := process.children(recursive=True)) < 4 or not (tmp_path / "run" / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.kill()
    process.wait()
    assert not psutil.wait_procs(members, timeout=60)[1]


def test_a_damaged_block_is_refused(options: dict[str, Any], tmp_path: Path):
    take(writer(options, tmp_path)._blocks(None), 1)[0].save(tmp_path / "block")
    tokens = bytes(Block.load(tmp_path / "block").tokens.tobytes())
    content = (tmp_path / "block").read_bytes().replace(tokens, bytes([tokens[0] ^ 1]) + tokens[1:])
    (tmp_path / "block").write_bytes(content)
    with pytest.raises(UserError, match="does not have the contents that were saved"):
        Block.load(tmp_path / "block")


@pytest.mark.slow
def test_a_killed_run_on_a_stream_resumes_to_the_same_curve(options: dict[str, Any], shards: Path, tmp_path: Path):
    """Blocks of sixteen sequences, four of them in an update; the writing process is another one each time."""
    whole = run(tmp_path / "whole", shards, **options)
    killed_run(tmp_path / "run", shards, 9, **options)
    resumed = run(tmp_path / "run", shards, **options)
    assert curve(resumed.output, "step", "loss") == curve(whole.output, "step", "loss")
    blocks = sorted(path.stem for path in (whole.output / "data" / "stream").glob("*.safetensors"))
    assert len(blocks) <= 3 + streaming.BLOCKS_AHEAD


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "killed"), [({"sequence_length": 16}, True), ({"shuffle_buffer": 8}, False)])
def test_a_stream_with_other_settings_is_read_anew(
    changes: dict[str, int], killed: bool, options: dict[str, Any], shards: Path, tmp_path: Path
):
    """In the place of a run that was killed before it saved anything, and of one that had saved."""
    short = {**options, "max_steps": 6}
    killed_run(tmp_path / "run", shards, 3 if killed else 5, **short)
    again = run(tmp_path / "run", shards, **short | changes, overwrite=not killed).output
    expected = run(tmp_path / "new", shards, **short | changes).output
    assert curve(again, "step", "loss") == curve(expected, "step", "loss")


def test_a_run_that_starts_anew_has_no_blocks_of_an_earlier_one(tmp_path: Path):
    """Validation data, whose tokens depend on no more than the texts and the tokenizer, stays; so does a source's."""
    run_folder = RunFolder(tmp_path)
    validation, block = run_folder.data / "validation" / "tokens.bin", block_path(run_folder.stream, 0)
    for path in (validation, block, run_folder.checkpoints / "step-000004" / "state.json"):
        path.parent.mkdir(parents=True)
        path.touch()
    run_folder.begin({"streaming": True}, run_folder.checkpoints / "step-000004")
    assert block.exists()
    run_folder.begin({"streaming": False, "mixture": {"stream": {}}}, None)
    assert block.exists()
    run_folder.begin({"streaming": True}, None)
    assert validation.exists()
    assert not run_folder.stream.exists()


def test_blocks_behind_a_gap_are_written_again(options: dict[str, Any], tmp_path: Path):
    """As they are left if blocks were deleted, the stream was read from its start, and that was interrupted."""
    made = writer(options, tmp_path)
    made.folder.mkdir(parents=True)
    for number, block in enumerate(take(made._blocks(None), 6)):
        if number not in (2, 3):
            block.save(block_path(made.folder, number))
    assert made._last_block(3)[0] == 2
    assert made._last_block(5)[0] == 2
    for number in (0, 1):
        block_path(made.folder, number).unlink()
    assert made._last_block(5)[0] == 6
    assert made._last_block(3) == (0, None)


@pytest.mark.parametrize("is_named", [True, False])
def test_validation_documents_in_the_stream_are_counted(
    is_named: bool, options: dict[str, Any], shards: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
):  # fmt: skip
    monkeypatch.setattr(streaming, "HELD_OUT_DOCUMENTS", 200)
    given = {**options, "validation_dataset": str(shards) if is_named else None}
    prepare(PretrainArguments(output=str(tmp_path), max_steps=1, **given), RunFolder(tmp_path))
    assert ("200 of the 450 validation documents are also training documents" in caplog.text) == is_named


@pytest.mark.slow
def test_what_stops_the_reading_stops_the_training(
    options: dict[str, Any], shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "shards"
    folder.mkdir()
    for path in shards.glob("[0-2].jsonl"):
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "1.jsonl").write_text('{"text": "The end."}\n{"text": ')
    options = {**options, "dataset": str(folder), "max_steps": 200}
    with pytest.raises(UserError, match="cannot read the head of the stream: JSON parse error"):
        run(tmp_path / "run", folder, **options)
    monkeypatch.setattr(streaming, "HELD_OUT_DOCUMENTS", 100)
    with pytest.raises(UserError, match="the training data could not be read on: JSON parse error"):
        run(tmp_path / "run", folder, **options)


def test_streams_that_cannot_be_read_exactly_are_refused(
    options: dict[str, Any], shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    refused = {"mixture": {"a": {"dataset": "x", "weight": 1}}, "skip_sequences": 3, "packing": "best_fit"}
    for name, value in refused.items():
        with pytest.raises(UserError, match="stream"):
            PretrainArguments(output="x", max_steps=1, **{**options, "dataset": "builtin", name: value})
    with pytest.raises(UserError, match="no column 'body'"):
        run(tmp_path / "run", shards, **options, text_column="body")
    few = {**options, "validation_dataset": None}
    with pytest.raises(UserError, match="ends after 450 documents"):
        run(tmp_path / "run", shards, **few)
    monkeypatch.setattr(streaming, "HELD_OUT_DOCUMENTS", 450)
    with pytest.raises(UserError, match="ends after 450 documents, and the first 450 are held out"):
        run(tmp_path / "run", shards, **few)
