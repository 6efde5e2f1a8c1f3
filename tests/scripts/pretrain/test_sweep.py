"""Sweeps: their values, their runs, which survive interruptions, and the line for the recipe."""

import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cases.training import ENVIRONMENT, RUN, arguments, command, curve, killed_after, parse, write_corpus

from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain.options.sweep import Sweep
from dynattn.scripts.pretrain.outputs.metrics import read_metrics
from dynattn.scripts.pretrain.stopping import StoppedError
from dynattn.scripts.pretrain.sweep import Outcome, best_of, read_outcomes, recipe_line, run_sweep
from dynattn.scripts.pretrain.sweep_processes import SweepTask, collect_answer, run_tasks, share_of, start

SHORT: dict[str, Any] = {"max_steps": 4, "warmup_steps": 1, "eval_every": 4, "save_every": 2}


def test_values_ascend_by_equal_factors():
    sweep = Sweep.parse("lr=1e-4:1e-2:5")
    assert sweep == Sweep("learning_rate", (1e-4, 3.16e-4, 1e-3, 3.16e-3, 1e-2))
    assert Sweep.parse("weight_decay=0.1:0.4:2").values == (0.1, 0.4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr", "sweep=lr must be NAME=FIRST:LAST:COUNT, like lr=1e-4:1e-2:7"),
        ("lr=1:2", "must be NAME=FIRST:LAST:COUNT"),
        ("lr=2:1:3", "must go up from a positive number, in 2 to 1000 runs"),
        ("lr=0:1:3", "must go up from a positive number"),
        ("lr=1:2:1", "must go up from a positive number"),
        ("seed=1:2:3", "sweep=seed=1:2:3: seed is none of"),
        ("schedule=1:2:3", "schedule is none of"),
        ("lr=1.2.3:4:5", "must be NAME=FIRST:LAST:COUNT"),
        ("ema_decay=0.9:0.99:2", "ema_decay is none of"),
        ("decay_share=0.1:0.4:3", "all runs would be the same; decay_share needs schedule: wsd"),
        ("muon_momentum=0.8:0.9:2", "all runs would be the same; muon_momentum needs optimizer: muon"),
        ("lr=1:1e999:3", "must go up from a positive number"),
        ("lr=1:1.001:3", "has values that are equal to three digits"),
        ("adam_beta2=0.9:1:2", "sweep=adam_beta2=0.9:1:2: adam_beta2=1.0 must be below 1"),
        ("lr=1:100:3", "sweep=lr=1:100:3: weight_decay=0.1 times the learning rate 10.0 must be below 1"),
    ],
)
def test_what_is_no_sweep_is_one_clear_error(text: str, message: str):
    with pytest.raises(UserError, match=message):
        parse("--output", "x", "--sweep", text)


def test_a_sweep_is_not_overwritten():
    with pytest.raises(UserError, match="a sweep goes on where it was interrupted; leave out overwrite and resume"):
        parse("--output", "x", "--sweep", "lr=1:2:3", "--overwrite")


def test_runs_survive_interruptions_and_end_in_a_plot_and_a_line(corpus: Path, tmp_path: Path):
    """The middle run is killed after an update, resumes there, and the largest rate diverges and is not repeated."""
    output = tmp_path / "sweep"
    sweep = arguments(output, corpus, **SHORT, sweep="lr=1e-3:1e30:3", weight_decay=0.0, max_grad_norm=1e38)
    with killed_after(3):
        run_sweep(sweep)
    told = run_sweep(sweep)
    runs = json.loads((output / "sweep.json").read_text())["runs"]
    assert [run["value"] for run in runs] == [1e-3, 3.16e13, 1e30]
    assert runs[0]["loss"] is not None
    assert runs[2]["loss"] is None
    assert "training stopped" in runs[2]["note"]
    assert (output / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "diverged" in told
    assert f"learning_rate: 0.001  # validation loss {runs[0]['loss']:.4f}, best of 3 from 0.001 to 1e+30" in told
    assert told.splitlines()[-1] == "the best value is at an end of the sweep; sweep beyond it before you trust it"
    before = {path: path.stat().st_mtime_ns for path in output.rglob("metrics.jsonl")}
    assert run_sweep(sweep) == told
    assert {path: path.stat().st_mtime_ns for path in output.rglob("metrics.jsonl")} == before
    steps = [line["step"] for line in read_metrics(output / "learning_rate=0.001" / "metrics.jsonl", "train")]
    assert steps == [1, 2, 3, 4]
    with pytest.raises(UserError, match=r"other settings \(batch_size was 4, is 2\)"):
        run_sweep(replace(sweep, batch_size=2))
    for content, message in (('{"settings"', "sweep.json is damaged"), ("{}", "is no record of a sweep")):
        (output / "sweep.json").write_text(content)
        with pytest.raises(UserError, match=message):
            run_sweep(sweep)


def test_results_of_other_settings_are_not_taken_for_those_of_the_sweep(corpus: Path, tmp_path: Path):
    output = tmp_path / "sweep"
    run_sweep(arguments(output, corpus, **SHORT, sweep="lr=1e-3:1e-2:2"))
    (output / "sweep.json").unlink()
    with pytest.raises(UserError, match="was trained with seed=0, and not 5; remove it, or give another output"):
        run_sweep(arguments(output, corpus, **SHORT, sweep="lr=1e-3:1e-2:2", seed=5))
    (output / "learning_rate=0.001" / "model").rename(tmp_path / "gone")  # as if killed before the model was saved
    run_sweep(arguments(output, corpus, **SHORT, sweep="lr=1e-3:1e-2:2"))
    assert (output / "learning_rate=0.001" / "model" / "model.safetensors").exists()


def test_a_sweep_of_a_version_with_fewer_options_goes_on(tmp_path: Path):
    record = tmp_path / "sweep.json"
    record.write_text('{"settings": {"seed": 0}, "runs": [{"value": 0.1, "loss": 2.0, "note": ""}]}')
    assert read_outcomes(record, {"seed": 0, "mask_documents": True}) == {0.1: Outcome(0.1, 2.0)}


def test_a_sweep_goes_on_only_with_the_texts_that_it_began_with(tmp_path: Path):
    text = write_corpus(tmp_path / "corpus.jsonl")
    sweep = arguments(tmp_path / "sweep", text, **SHORT, sweep="lr=1e-3:1e-2:2")
    told = run_sweep(sweep)
    text.write_text(text.read_text()[:-200].rpartition("\n")[0])
    with pytest.raises(UserError, match=r"learning_rate=0.001 has read other training data .* give those texts, or"):
        run_sweep(sweep)
    write_corpus(text)
    assert run_sweep(sweep) == told


def test_a_sweep_out_of_time_stops_at_a_checkpoint(corpus: Path, tmp_path: Path):
    with pytest.raises(StoppedError, match="stopped by max_seconds"):
        run_sweep(
            arguments(tmp_path / "sweep", corpus, **SHORT | {"max_steps": 4000}, sweep="lr=1e-3:1e-2:2", max_seconds=2)
        )
    assert list((tmp_path / "sweep" / "learning_rate=0.001" / "checkpoints").iterdir())


@pytest.mark.slow
def test_runs_at_the_same_time_end_as_one_after_the_other(corpus: Path, tmp_path: Path):
    """Three runs in two processes, of which the last diverges; a second command finds all ended."""
    options: dict[str, Any] = {**SHORT, "sweep": "lr=1e-3:1e30:3", "weight_decay": 0.0, "max_grad_norm": 1e38}
    told = run_sweep(arguments(tmp_path / "one", corpus, **options))
    many = arguments(tmp_path / "many", corpus, **options, sweep_workers=2)
    assert run_sweep(many) == told.replace(str(tmp_path / "one"), str(tmp_path / "many"))
    one, two = (sorted((tmp_path / name).glob("*/metrics.jsonl")) for name in ("one", "many"))
    assert len(one) == 3
    for first, second in zip(one, two, strict=True):
        assert curve(first.parent, "step", "loss", "grad_norm") == curve(second.parent, "step", "loss", "grad_norm")
    assert (tmp_path / "many" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "engine: ddp, 1 process on cpu" in (tmp_path / "many" / "0.001.log").read_text()
    assert run_sweep(many) == told.replace(str(tmp_path / "one"), str(tmp_path / "many"))


@pytest.mark.slow
def test_a_signal_stops_all_runs_of_a_sweep_at_checkpoints(tmp_path: Path):
    output = tmp_path / "sweep"
    options = {**RUN, **SHORT, "max_steps": 4000, "sweep": "lr=1e-3:1e-2:3", "sweep_workers": 2, "output": output}
    options["keep_checkpoints"] = 0
    options["dataset"] = write_corpus(tmp_path / "corpus.jsonl")
    process = subprocess.Popen(command(options), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    runs = [output / f"learning_rate={rate}" for rate in ("0.001", "0.00316")]
    while not all((run / "checkpoints" / "step-000002").exists() for run in runs) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert errors.strip().startswith("stopped by SIGTERM"), errors
    for run in runs:
        last = curve(run, "step", split="train")[-1][0]
        assert (run / "checkpoints" / f"step-{last:06d}").exists()
    assert not (output / "learning_rate=0.01").exists()


def test_a_signal_ends_a_process_that_is_being_started_without_a_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        worker = start(0, 1, 1.0, SweepTask(partial(time.sleep, 60), tmp_path / "1.log"))
    finally:
        signal.signal(signal.SIGINT, earlier)
    os.kill(worker.process.pid or 0, signal.SIGINT)
    _, failure = collect_answer(worker, tmp_path / "1.log")
    assert isinstance(failure, StoppedError)
    assert (capfd.readouterr().err, (tmp_path / "1.log").read_text()) == ("", "")


@pytest.mark.slow
def test_a_process_that_dies_is_told_of_and_no_other_begins(tmp_path: Path):
    works = {1.0: partial(abs, -4), 2.0: partial(os._exit, 3), 3.0: partial(abs, -5)}
    answers = run_tasks({name: SweepTask(work, tmp_path / f"{name:g}.log") for name, work in works.items()}, at_once=1)
    assert next(answers) == (1.0, 4)
    with pytest.raises(UserError, match=f"the run of 2 ended with status 3; {tmp_path}/2.log has what it printed"):
        next(answers)
    assert not (tmp_path / "3.log").exists()


def test_each_of_several_processes_has_its_cores_and_its_gpu():
    gpus = {"CUDA_VISIBLE_DEVICES": "2,5,7"}
    assert share_of(0, 4, gpus, 8) == {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "2"}
    assert share_of(3, 4, gpus, 2) == {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "2"}
    assert share_of(1, 2, {"CUDA_VISIBLE_DEVICES": "4", "OMP_NUM_THREADS": "3"}, 8) == {}


def test_several_processes_are_for_a_sweep_alone(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match="sweep_workers=2 is for a sweep; give sweep, or leave it out"):
        parse("--output", "x", "--sweep_workers", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="torchrun has started several processes; start it without torchrun"):
        run_sweep(arguments(tmp_path / "sweep", corpus, sweep="lr=1:2:2", weight_decay=0.1))
    assert not (tmp_path / "sweep").exists()


def test_the_best_is_the_least_loss_of_runs_that_ended():
    sweep = Sweep("learning_rate", (1.0, 2.0, 3.0))
    outcomes = [Outcome(1.0, 3.0), Outcome(2.0, 2.5), Outcome(3.0, None, "it diverged")]
    assert best_of(outcomes).value == 2.0
    assert recipe_line(sweep, outcomes) == "learning_rate: 2  # validation loss 2.5000, best of 3 from 1 to 3"
    with pytest.raises(UserError, match="all 1 runs of the sweep have diverged: it diverged"):
        best_of(outcomes[2:])
