"""Trackers: TensorBoard that does not start, and the real packages of others, without a network, where installed."""

import signal
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.tracking import TensorBoardTracker
from cases.training import run

from dynattn.scripts.common.errors import StoppedError
from dynattn.scripts.pretrain.outputs.metrics import MetricsLog


def test_a_signal_while_tensorboard_starts_ends_the_run(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def start(tracker: TensorBoardTracker) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(TensorBoardTracker, "start", start)
    with pytest.raises(StoppedError, match="stopped by SIGTERM"):
        run(tmp_path / "run", corpus, max_steps=2, warmup_steps=1)


def test_tensorboard_drops_the_points_after_the_update_that_a_run_resumes_from(tmp_path: Path) -> None:
    started: dict = {}
    accelerator: Any = SimpleNamespace(is_main_process=False, init_trackers=lambda name, **given: started.update(given))
    MetricsLog(tmp_path / "metrics.jsonl", accelerator, step=3)
    assert started == {"init_kwargs": {"tensorboard": {"purge_step": 4}}}


def test_wandb_offline_keeps_the_run(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    run(tmp_path / "run", corpus, max_steps=2, warmup_steps=1, trackers=["wandb"])
    (file,) = tmp_path.rglob("*.wandb")
    assert b"train/loss" in file.read_bytes()


def test_trackio_keeps_the_run_in_a_file(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    run(tmp_path / "run", corpus, max_steps=2, warmup_steps=1, trackers=["trackio"])
    (file,) = (tmp_path / "trackio").rglob("*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("select metrics from metrics").fetchall()
    assert any("train/loss" in str(row) for row in rows)


def test_trackers_get_what_was_measured_and_the_terminal_no_hundreds_of_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracked: dict[str, Any] = {}
    accelerator: Any = SimpleNamespace(is_main_process=True, init_trackers=lambda *_, **__: None)
    accelerator.log = lambda values, step: tracked.update(values, step=step)
    log = MetricsLog(tmp_path / "metrics.jsonl", accelerator, step=0)
    log.write({"step": 20, "split": "validation", "loss": 6.4, "bits_per_byte": None, "targets": 1502})
    log.write({"step": 20, "split": "composition", "00.pre.static": 0.5})
    assert capsys.readouterr().out == "step 20 · validation · loss 6.4 · targets 1502\n"
    assert (tracked["step"], tracked["validation/loss"], tracked["composition/00.pre.static"]) == (20, 6.4, 0.5)
