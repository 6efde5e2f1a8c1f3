"""Runs in processes of their own: two of them under torchrun, and one that is killed."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from dynattn.scripts.pretrain.outputs.metrics import read_metrics

pytestmark = pytest.mark.slow

CONFIG = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
OPTIONS = [
    *("--model_type", "llama", "--model_config", json.dumps(CONFIG), "--vocab_size", "300", "--sequence_length", "32"),
    *("--max_steps", "40", "--log_every", "1", "--eval_every", "20", "--save_every", "4", "--learning_rate", "1e-2"),
]
SINGLE = [sys.executable, "-m", "dynattn.scripts.cli", "pretrain"]
DOUBLE = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
DOUBLE += ["-m", "dynattn.scripts.cli", "pretrain"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}


def call(command: list[str], output: Path, *options: str, status: int | None = 0) -> str:
    done = subprocess.run(
        [*command, "--output", str(output), *OPTIONS, *options],
        env=ENVIRONMENT, cwd=output.parent, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert status is None or done.returncode == status, done.stderr
    return done.stderr


def curve(output: Path, *names: str) -> list[Any]:
    return [tuple(line.get(name) for name in names) for line in read_metrics(output / "metrics.jsonl")]


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("double") / "run"
    call(DOUBLE, output, "--batch_size", "2")
    return output


def test_two_processes_train_the_model_that_one_trains(double: Path, tmp_path: Path):
    call(SINGLE, tmp_path / "run", "--batch_size", "4")
    assert curve(double, "step", "split", "tokens") == curve(tmp_path / "run", "step", "split", "tokens")
    for one, two in zip(curve(tmp_path / "run", "loss"), curve(double, "loss"), strict=True):
        assert one == pytest.approx(two, rel=1e-4)
    one, two = (load_file(output / "model" / "model.safetensors") for output in (tmp_path / "run", double))
    assert one.keys() == two.keys()


def test_two_processes_resume_to_the_same_curve(double: Path, tmp_path: Path):
    output = tmp_path / "run"
    kill_after_checkpoint(DOUBLE, output, "step-000004", "--batch_size", "2")
    call(DOUBLE, output, "--batch_size", "2")
    assert curve(output, "step", "split", "loss", "grad_norm") == curve(double, "step", "split", "loss", "grad_norm")


def test_a_killed_process_resumes_to_the_same_curve(tmp_path: Path):
    call(SINGLE, tmp_path / "straight")
    kill_after_checkpoint(SINGLE, tmp_path / "killed", "step-000004")
    call(SINGLE, tmp_path / "killed")
    names = ("step", "split", "loss", "grad_norm", "bits_per_byte")
    assert curve(tmp_path / "killed", *names) == curve(tmp_path / "straight", *names)


def test_two_processes_tell_a_mistake_once(double: Path):
    error = call(DOUBLE, double, "--batch_size", "2", status=None)
    assert error.count("dynattn pretrain: error:") == 1
    assert "already holds a finished model" in error


def kill_after_checkpoint(command: list[str], output: Path, name: str, *options: str) -> None:
    """Starts a run and ends all its processes with SIGKILL as soon as it has written a checkpoint."""
    process = subprocess.Popen(
        [*command, "--output", str(output), *OPTIONS, *options],
        env=ENVIRONMENT, cwd=output.parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while not (output / "checkpoints" / name).exists() and process.poll() is None:
            time.sleep(0.005)
    finally:
        for member in [*psutil.Process(process.pid).children(recursive=True), process]:
            member.kill()
        process.wait()
    assert not (output / "model").exists(), "the run ended before it could be killed"
