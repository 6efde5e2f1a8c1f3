"""Runs in processes of their own: two of them under torchrun, and one that is killed."""

import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from cases.training import ENVIRONMENT, call, command, curve
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

RUN = {
    "model_type": "llama",
    "model_config": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    "vocab_size": 300,
    "sequence_length": 32,
    "max_steps": 40,
    "log_every": 1,
    "eval_every": 20,
    "save_every": 4,
    "learning_rate": 1e-2,
}


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("double") / "run"
    call(options(output, batch_size=2), processes=2)
    return output


def options(output: Path, **changes: Any) -> dict[str, Any]:
    return {**RUN, "output": output, **changes}


def test_two_processes_train_the_model_that_one_trains(double: Path, tmp_path: Path):
    call(options(tmp_path / "run", batch_size=4))
    assert curve(double, "step", "split", "tokens") == curve(tmp_path / "run", "step", "split", "tokens")
    for one, two in zip(curve(tmp_path / "run", "loss"), curve(double, "loss"), strict=True):
        assert one == pytest.approx(two, rel=1e-4)
    one, two = (load_file(output / "model" / "model.safetensors") for output in (tmp_path / "run", double))
    assert one.keys() == two.keys()


def test_two_processes_resume_to_the_same_curve(double: Path, tmp_path: Path):
    output = tmp_path / "run"
    kill_after_checkpoint("step-000004", options(output, batch_size=2), processes=2)
    call(options(output, batch_size=2), processes=2)
    assert curve(output, "step", "split", "loss", "grad_norm") == curve(double, "step", "split", "loss", "grad_norm")


def test_a_killed_process_resumes_to_the_same_curve(tmp_path: Path):
    call(options(tmp_path / "straight"))
    kill_after_checkpoint("step-000004", options(tmp_path / "killed"))
    call(options(tmp_path / "killed"))
    names = ("step", "split", "loss", "grad_norm", "bits_per_byte")
    assert curve(tmp_path / "killed", *names) == curve(tmp_path / "straight", *names)


def test_two_processes_tell_a_mistake_once(double: Path):
    error = call(options(double, batch_size=2), processes=2, status=None)
    assert error.count("dynattn pretrain: error:") == 1
    assert "already holds a finished model" in error


def kill_after_checkpoint(name: str, settings: dict[str, Any], processes: int = 1) -> None:
    """Starts a run and ends all its processes with SIGKILL as soon as it has written a checkpoint."""
    output = settings["output"]
    process = subprocess.Popen(
        command(settings, processes),
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
