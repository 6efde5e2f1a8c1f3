"""Runs in processes of their own: two of them under torchrun, and some that are killed or asked to stop."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_to_one_process_stops_all_after_the_same_update(processes: int, double: Path, tmp_path: Path):
    output = tmp_path / "run"
    settings = options(output, batch_size=4 // processes, dataloader_workers=1, save_every=1000)
    with started(settings, processes) as process:
        wait_for(lambda: len(curve(output, "step", split="train")) > 4, process)
        trainers = [member for member in processes_of(process) if "dynattn.scripts.cli" in member.cmdline()]
        trainers = [member for member in trainers if "torch.distributed.run" not in member.cmdline()]
        max(trainers[:processes], key=lambda member: member.pid).send_signal(signal.SIGTERM)
        error = process.communicate(timeout=120)[1]
    assert process.returncode == (128 + signal.SIGTERM if processes == 1 else 1), error
    assert error.count("stopped by SIGTERM; update ") == 1
    (saved,) = (output / "checkpoints").iterdir()
    assert f"update {int(saved.name.removeprefix('step-'))} is finished and saved" in error
    call(settings, processes)
    names = ("step", "split", "loss", "grad_norm", "bits_per_byte")
    if processes == 2:
        assert curve(output, *names) == curve(double, *names)
    else:
        call(options(tmp_path / "straight", batch_size=4))
        assert curve(output, *names) == curve(tmp_path / "straight", *names)


def test_a_signal_to_all_processes_at_once_stops_them_too(tmp_path: Path):
    """What a terminal and a batch system do; data loaders and torchrun itself are among the processes."""
    output = tmp_path / "run"
    settings = options(output, batch_size=2, dataloader_workers=1, save_every=1000)
    with started(settings, processes=2) as process:
        wait_for(lambda: len(curve(output, "step", split="train")) > 4, process)
        os.killpg(process.pid, signal.SIGINT)
        error = process.communicate(timeout=120)[1]
    assert error.count("stopped by SIGINT; update ") == 1
    assert len(list((output / "checkpoints").iterdir())) == 1


def test_two_processes_tell_a_mistake_once(double: Path):
    error = call(options(double, batch_size=2), processes=2, status=None)
    assert error.count("dynattn pretrain: error:") == 1
    assert "already holds a finished model" in error


def kill_after_checkpoint(name: str, settings: dict[str, Any], processes: int = 1) -> None:
    """Starts a run and ends all its processes with SIGKILL as soon as it has written a checkpoint."""
    output = settings["output"]
    with started(settings, processes) as process:
        wait_for((output / "checkpoints" / name).exists, process)
    assert not (output / "model").exists(), "the run ended before it could be killed"


@contextmanager
def started(settings: dict[str, Any], processes: int = 1) -> Iterator[subprocess.Popen[str]]:
    """A run in a process group of its own; all its processes that are left at the end are killed."""
    process = subprocess.Popen(
        command(settings, processes),
        env=ENVIRONMENT, cwd=settings["output"].parent, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        for member in processes_of(process):
            member.kill()
        process.communicate()


def processes_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that a process has started, and that process itself, unless it has ended."""
    if process.poll() is not None:
        return []
    first = psutil.Process(process.pid)
    return [first, *first.children(recursive=True)]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Waits until the condition holds, or the process has ended."""
    while not condition() and process.poll() is None:
        time.sleep(0.005)
