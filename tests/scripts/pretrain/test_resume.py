"""Runs that go on: from an earlier version's checkpoints, past damage, beyond their end, out of time."""

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from cases.training import LLAMA, assert_same_run, curve, earlier_format, killed_run, run, run_forked, without_timing
from safetensors.torch import load_file
from transformers import LlamaConfig

from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain import PretrainArguments, Result
from dynattn.scripts.pretrain.data.batch_order import TrainingOrder
from dynattn.scripts.pretrain.data.preparation import Source
from dynattn.scripts.pretrain.fingerprint import build_fingerprint
from dynattn.scripts.pretrain.outputs import checkpoint
from dynattn.scripts.pretrain.schedule import build_schedule
from dynattn.scripts.pretrain.stopping import StoppedError

STREAM = {"streaming": True, "dataset": "folder", "tokenizer": "folder"}
# New processes have no random state to restore, so dropout would differ.
WITHOUT_DROPOUT = {**LLAMA, "attention_dropout": 0.0}


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 255
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("option", "value", "needed"), [("muon_momentum", 0.9, {"optimizer": "muon"}), ("shuffle_buffer", 8, STREAM)]
)
def test_options_without_effect_may_change(option: str, value: float, needed: dict[str, Any]):
    def fingerprint(**given: Any) -> dict[str, Any]:
        arguments = PretrainArguments(output="x", max_steps=9, **given)
        source = cast(Source, SimpleNamespace(fingerprint=dict))
        return build_fingerprint(
            arguments, LlamaConfig(), source, build_schedule(arguments, 9, 1), TrainingOrder(9, 1, 0)
        )

    assert fingerprint(**{option: value}) == fingerprint()
    assert fingerprint(**{option: value}, **needed) != fingerprint(**needed)


def test_checkpoints_of_an_earlier_version_resume_bit_for_bit(finished: Result, corpus: Path, tmp_path: Path):
    with earlier_format():
        killed_run(tmp_path / "run", corpus, 7)
    saved = tmp_path / "run" / "checkpoints" / "step-000004"
    assert {path.name for path in saved.iterdir()} >= {"model.safetensors", "optimizer.bin", "random_states_0.pkl"}
    run(tmp_path / "run", corpus)
    assert_same_run(tmp_path / "run", finished.output)


@pytest.mark.slow
def test_checkpoints_of_an_earlier_version_resume_in_shards(corpus: Path, tmp_path: Path):
    output, sharded = tmp_path / "run", {"engine": "fsdp2", "batch_size": 2}
    killed_run(tmp_path / "new", corpus, 7, model_config=WITHOUT_DROPOUT)
    with earlier_format():
        killed_run(output, corpus, 7, model_config=WITHOUT_DROPOUT)
    for folder in (output, tmp_path / "new"):
        run_forked(2, folder, corpus, **sharded, model_config=WITHOUT_DROPOUT)
    assert without_timing(output) == without_timing(tmp_path / "new")


def test_resume_intact_falls_back_and_says_what_it_skips(
    finished: Result, interrupted: Path, corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    output = Path(shutil.copytree(interrupted, tmp_path / "run"))
    (damaged,) = (output / "checkpoints" / "step-000008" / "tensors").iterdir()
    flip_last_byte(damaged)
    with pytest.raises(UserError, match="step-000008 is damaged"):
        run(output, corpus)
    with caplog.at_level(logging.WARNING):
        run(output, corpus, resume="intact", keep_checkpoints=1)
    assert "skipping the checkpoint" in caplog.text
    assert f"{damaged.name} does not have the contents that were saved" in caplog.text
    assert_same_run(output, finished.output)
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["abandoned-1", "step-000012"]
    assert (output / "checkpoints" / "abandoned-1" / "step-000008").is_dir()


def test_resume_intact_starts_anew_without_checkpoints_and_refuses_damaged_ones_alone(
    interrupted: Path, corpus: Path, tmp_path: Path
):
    assert run(tmp_path / "new", corpus, resume="intact", max_steps=2, warmup_steps=0).steps == 2
    output = Path(shutil.copytree(interrupted, tmp_path / "run"))
    for path in (output / "checkpoints").iterdir():
        (path / "state.json").unlink()
    with pytest.raises(UserError, match=r"none of the 2 checkpoints in .* is intact; --overwrite starts anew"):
        run(output, corpus, resume="intact")


def test_going_back_moves_later_checkpoints_out_of_the_way_for_good(
    finished: Result, interrupted: Path, corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """The next start, a fork and another return find what they mean, and nothing that was saved is lost."""
    output = Path(shutil.copytree(interrupted, tmp_path / "run"))
    saved, left = output / "checkpoints", output / "checkpoints" / "abandoned-1"
    metrics = (output / "metrics.jsonl").read_text()
    with caplog.at_level(logging.WARNING):
        killed_run(output, corpus, 6, resume=str(saved / "step-000004"))
    assert f"going on from update 4; moved to {left}, with a copy of the metrics: step-000008;" in caplog.text
    assert sorted(path.name for path in saved.iterdir()) == ["abandoned-1", "step-000004"]
    assert (left / "metrics.jsonl").read_text() == metrics
    assert checkpoint.find_damage(left / "step-000008") is None
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"resumes from .*step-000008 would delete it with the run that is there"):
            run(output, corpus, resume=str(left / "step-000008"), overwrite=overwrite)
    assert checkpoint.find_damage(left / "step-000008") is None
    run(tmp_path / "fork", corpus, resume=str(left / "step-000008"))
    assert_same_run(tmp_path / "fork", finished.output, after=8)
    killed_run(output, corpus, 11)
    killed_run(output, corpus, 5, resume=str(saved / "step-000004"))
    assert [path.name for path in (saved / "abandoned-2").glob("step-*")] == ["step-000008"]
    run(output, corpus)
    assert_same_run(output, finished.output)


def test_a_start_that_fails_leaves_later_checkpoints_where_they_are(interrupted: Path, corpus: Path, tmp_path: Path):
    output = Path(shutil.copytree(interrupted, tmp_path / "run"))
    chosen = output / "checkpoints" / "step-000004"
    with pytest.raises(UserError, match="this changed: seed"):
        run(output, corpus, resume=str(chosen), seed=1)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="cannot load"):
        patch.setattr(checkpoint, "load_random_state", lambda *_: {}["none"])
        run(output, corpus, resume=str(chosen))
    assert sorted(path.name for path in chosen.parent.iterdir()) == ["step-000004", "step-000008"]


def test_a_finished_run_is_extended_by_more_updates(corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    output = tmp_path / "run"
    first = run(output, corpus, max_steps=4)
    with caplog.at_level(logging.WARNING):
        second = run(output, corpus, max_steps=8, decay_share=0.3)
    assert "the run had ended after 4 updates and now goes on to 8" in caplog.text
    assert (first.steps, second.steps) == (4, 8)
    assert curve(output, "step", split="train") == [[step] for step in range(1, 9)]
    for changes in ({"max_steps": 8}, {"max_steps": 6}, {"max_steps": 12, "resume": "never"}):
        with pytest.raises(UserError, match="already holds a finished model; give another folder, more --max_steps"):
            run(output, corpus, **changes)
    with pytest.raises(UserError, match=r"this changed: learning_rate \(was 0.01, is 0.02\)"):
        run(output, corpus, max_steps=12, learning_rate=2e-2)


def test_an_extension_that_is_killed_goes_on(corpus: Path, tmp_path: Path):
    output = tmp_path / "run"
    run(output, corpus, max_steps=4)
    killed_run(output, corpus, 10, max_steps=12)
    assert (output / "model").exists()
    assert run(output, corpus, max_steps=12).steps == 12


def test_a_run_out_of_time_stops_at_a_checkpoint(finished: Result, corpus: Path, tmp_path: Path):
    with pytest.raises(StoppedError, match="stopped by max_seconds; update 1 is finished and saved") as stopped:
        run(tmp_path / "run", corpus, max_seconds=0.001)
    assert stopped.value.status == 124
    run(tmp_path / "run", corpus, max_seconds=1e6)
    assert_same_run(tmp_path / "run", finished.output)


def test_saving_in_the_background_changes_nothing(finished: Result, corpus: Path, tmp_path: Path):
    output = tmp_path / "run"
    run(output, corpus, save_in_background=True)
    assert_same_run(output, finished.output)
    for step in (4, 8, 12):
        one, two = (folder / "checkpoints" / f"step-{step:06d}" for folder in (output, finished.output))
        assert checkpoint.find_damage(one) is None
        (written,) = (one / "tensors").iterdir()
        expected = load_file(two / "tensors" / written.name)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in load_file(written).items())
