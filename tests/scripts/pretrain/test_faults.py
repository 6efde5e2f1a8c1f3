"""Runs that find their files damaged, their folder in use, or their disk full."""

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.training import earlier_format, killed_run, run, without_timing, write_state
from tensorboard.summary.writer.record_writer import RecordWriter

from dynattn.scripts.cli import main
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.common.folder_lock import FolderLock
from dynattn.scripts.pretrain import Result
from dynattn.scripts.pretrain.arguments import PretrainArguments
from dynattn.scripts.pretrain.data import text_encoder
from dynattn.scripts.pretrain.outputs import checkpoint
from dynattn.scripts.pretrain.outputs.checksums import measure
from dynattn.scripts.pretrain.outputs.run_folder import RunFolder

TENSORS = "tensors/shard-00001-model-00001-of-00001.safetensors"


@pytest.fixture
def output(interrupted: Path, tmp_path: Path) -> Path:
    """The output of a run that was killed after ten updates, of which eight are saved."""
    return Path(shutil.copytree(interrupted, tmp_path / "run"))


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """No file can grow beyond `size` bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def damage_file(file: Path, damage: str) -> None:
    content = file.read_bytes()
    middle = len(content) // 2
    file.unlink()
    if damage == "truncate":
        file.write_bytes(content[:middle])
    elif damage == "flip":
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :])
    elif damage == "link to nothing":
        file.symlink_to("nowhere")
    elif damage == "link to another file":
        file.symlink_to(file.parents[2] / "run.json")


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
@pytest.mark.parametrize(
    "name", ["data/train/tokens.bin", "data/train/starts.npy", "data/validation/tokens.bin", "tokenizer/tokenizer.json"]
)
def test_damaged_data_is_refused_before_anything_is_trained(name: str, damage: str, output: Path, corpus: Path):
    damage_file(output / name, damage)
    with pytest.raises(UserError, match=f"prepared data in .* is damaged: {name} .*; delete {output}/data to have it"):
        run(output, corpus)


def test_data_that_is_deleted_is_prepared_again_and_compared(
    finished: Result, output: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
):
    tokenize = text_encoder.tokenize
    shutil.rmtree(output / "data")
    with monkeypatch.context() as patch:
        patch.setattr(text_encoder, "tokenize", lambda texts, tokenizer: [d[::-1] for d in tokenize(texts, tokenizer)])
        with pytest.raises(UserError, match=r"because this changed: training_tokens .*, validation_tokens"):
            run(output, corpus)
    run(output, corpus)
    assert without_timing(output) == without_timing(finished.output)


@pytest.mark.parametrize("name", [TENSORS, "random-00000.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "link to nothing", "link to another file"])
def test_a_damaged_checkpoint_is_named_with_the_one_to_use(name: str, damage: str, output: Path, corpus: Path):
    damage_file(output / "checkpoints" / "step-000008" / name, damage)
    with pytest.raises(UserError, match=rf"step-000008 is damaged: {name}.*; take .*step-000004 instead"):
        run(output, corpus)


def test_an_edited_state_and_a_file_that_was_not_saved_are_damage(output: Path):
    folder = output / "checkpoints" / "step-000008"
    content = (folder / "state.json").read_text()
    (folder / "state.json").write_text(content.replace('"step": 8', '"step": 4'))
    assert checkpoint.find_damage(folder) == "state.json does not have the contents that were saved"
    for nonsense in ("[]", "{}", "3", '{"checksum": 0}', "[" * 100_000):
        (folder / "state.json").write_text(nonsense)
        assert str(checkpoint.find_damage(folder)).startswith("state.json ")
    (folder / "state.json").write_text(content)
    assert checkpoint.find_damage(folder) is None
    earlier_version = {name: value for name, value in json.loads(content).items() if name != "checksum"}
    (folder / "state.json").write_text(json.dumps(earlier_version))
    assert checkpoint.find_damage(folder) is None
    (folder / "memory-00001.safetensors").touch()
    assert checkpoint.find_damage(folder) == "memory-00001.safetensors was not saved with it"


@pytest.mark.parametrize("name", ["optimizer.bin", "random_states_0.pkl"])
def test_code_in_a_checkpoint_of_an_earlier_version_is_not_run(name: str, corpus: Path, tmp_path: Path):
    """Checksums are no protection from somebody who means harm, and makes them anew."""
    output = tmp_path / "run"
    with earlier_format():
        killed_run(output, corpus, 10)

    class Harm:
        def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
            return os.mkdir, (str(tmp_path / "harm"),)

    folder = output / "checkpoints" / "step-000008"
    torch.save(Harm(), folder / name)
    state = json.loads((folder / "state.json").read_text())
    state["files"][name] = measure(folder / name)
    del state["checksum"]
    write_state(folder, state)
    with pytest.raises(UserError, match=r"cannot load the checkpoint .*step-000008: .*; resume from another one"):
        run(output, corpus)
    assert not (tmp_path / "harm").exists()


def test_a_folder_in_use_is_refused_and_stays_as_it_is(output: Path, corpus: Path):
    lock = FolderLock(output / ".lock")
    lock.take()
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    for changes in ({}, {"overwrite": True}):
        with pytest.raises(UserError, match=f"output={output} is in use by process {os.getpid()} on"):
            run(output, corpus, **changes)
    assert before == {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    lock.release()
    assert run(output, corpus).steps == 12


def test_what_a_failure_leaves_half_written_is_removed_by_the_next_run(finished: Result, output: Path, corpus: Path):
    half_written = [
        *(".prepared/data", ".model.partial", "checkpoints/.step-000007.partial", "checkpoints/.deleted"),
        *(".run.json.partial", ".metrics.jsonl.partial", ".lock"),
    ]
    for name in half_written:
        if name.endswith(("json.partial", "jsonl.partial", "lock")):
            (output / name).touch()
        else:
            (output / name).mkdir(parents=True)
    run(output, corpus)
    assert {path.name for path in output.iterdir()} == {path.name for path in finished.output.iterdir()}
    assert all(path.name.startswith("step-") for path in (output / "checkpoints").iterdir())


def test_a_run_killed_before_it_began_leaves_its_folder_usable(corpus: Path, tmp_path: Path):
    for name in (".prepared/data", ".prepared/tokenizer"):
        (tmp_path / "run" / name).mkdir(parents=True)
    for name in (".lock", ".run.json.partial"):
        (tmp_path / "run" / name).touch()
    assert run(tmp_path / "run", corpus, max_steps=1, warmup_steps=0).steps == 1


@pytest.mark.parametrize("size", [0, 200, 1 << 10, 1 << 12, 1 << 14, 1 << 15, 1 << 16])
def test_a_full_disk_is_one_clear_error_and_loses_nothing(size: int, finished: Result, corpus: Path, tmp_path: Path):
    """The first to fail is the lock, the tokenizer, the data, the metrics, the weights or the optimizer."""
    output = tmp_path / "run"
    with (
        small_files(size),
        pytest.raises(UserError, match=f"cannot read or write .*{output}.*; make room there or") as told,
    ):
        run(output, corpus)
    assert str(told.value).count("cannot read or write") == 1
    assert not output.exists() or not [path for path in output.rglob(".*") if path.name != ".metrics.jsonl.partial"]
    run(output, corpus)
    assert without_timing(output) == without_timing(finished.output)


def test_tensorboard_that_cannot_write_prints_no_traceback(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
):
    def refuse(self: RecordWriter, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RecordWriter, "write", refuse)
    with pytest.raises(UserError, match=r"cannot read or write .*: No space left on device"):
        run(tmp_path / "run", corpus)
    assert "Traceback" not in capfd.readouterr().err


def test_a_full_disk_keeps_the_last_checkpoint(finished: Result, corpus: Path, tmp_path: Path):
    killed_run(tmp_path / "run", corpus, 6)
    with small_files(1 << 14), pytest.raises(UserError, match="cannot read or write"):
        run(tmp_path / "run", corpus)
    assert checkpoint.find_damage(tmp_path / "run" / "checkpoints" / "step-000004") is None
    run(tmp_path / "run", corpus)
    assert without_timing(tmp_path / "run") == without_timing(finished.output)


@pytest.mark.parametrize("place", ["file/run", "file/deep/run", "x" * 300])
def test_an_impossible_output_is_one_clear_error(
    place: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    (tmp_path / "file").touch()
    assert main(["pretrain", "--output", str(tmp_path / place), "--dataset", str(corpus)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dynattn pretrain: error: cannot read or write ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("result", ["", "[]", "{}", '{"steps": null}'])
def test_a_finished_run_with_a_damaged_result_is_not_extended(result: str, tmp_path: Path):
    run_folder = RunFolder(tmp_path)
    run_folder.model.mkdir()
    (run_folder.checkpoints / "step-000004").mkdir(parents=True)
    run_folder.result.write_text(result)
    with pytest.raises(UserError, match="already holds a finished model"):
        run_folder.start_point(PretrainArguments(output=str(tmp_path), max_steps=8))
