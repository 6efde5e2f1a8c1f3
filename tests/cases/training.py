"""Small pretraining runs: their text, runs that are killed, loss curves, and runs in processes of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate.state import AcceleratorState
from accelerate.utils import memory
from safetensors.torch import load_file
from torch import Tensor

from dynattn.scripts.common import environment
from dynattn.scripts.common.arguments import parse_arguments
from dynattn.scripts.pretrain import PretrainArguments, Result, pretrain
from dynattn.scripts.pretrain.carried_memory import CarriedMemory
from dynattn.scripts.pretrain.main import find_shipped
from dynattn.scripts.pretrain.outputs import checkpoint, checksums, throughput
from dynattn.scripts.pretrain.outputs.checkpoint_writer import CheckpointWriter
from dynattn.scripts.pretrain.outputs.metrics import read_metrics
from dynattn.scripts.pretrain.results import RATES
from dynattn.scripts.pretrain.trainer import Trainer

from .checkpoints import assert_same_weights, weights_of
from .processes import in_processes

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "attention_dropout": 0.1,
}
RUN = {
    "model_type": "llama",
    "model_config": LLAMA,
    "vocab_size": 300,
    "sequence_length": 32,
    "batch_size": 4,
    "max_steps": 12,
    "warmup_steps": 2,
    "learning_rate": 1e-2,
    "validation_share": 0.1,
    "log_every": 1,
    "eval_every": 4,
    "save_every": 4,
}


@pytest.fixture(scope="session", autouse=True)
def one_machine() -> Iterator[None]:
    """What every run reports of the machine, the rate of matrix products and the versions, is found out once.

    Accelerate looks for garbage among all objects of the process when a run ends, and Python does so often enough.
    """
    with pytest.MonkeyPatch.context() as patch:
        clear = memory.clear_device_cache
        patch.setattr(memory, "clear_device_cache", lambda garbage_collection=False: clear())
        patch.setattr(environment, "version", cache(environment.version))
        patch.setattr(throughput, "gemm_rate", cache(throughput.gemm_rate))
        yield


def write_corpus(path: Path, longest: int = 3) -> Path:
    """Twenty documents of one to `longest` sentences, one JSON object a line."""
    texts = (f"The number {n} is followed by {n + 1}. " * (1 + n % longest) for n in range(20))
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


def parse(*argv: str) -> PretrainArguments:
    """The arguments that a command line means, with a shipped recipe by its name."""
    return parse_arguments(PretrainArguments, find_shipped(argv), prog="dynattn pretrain")


@contextmanager
def killed_after(step: int) -> Iterator[None]:
    """The run inside dies after `step` updates, before anything of the last one is logged or saved."""

    class KilledError(Exception):
        pass

    def show(trainer: Trainer, bar: Any, loss: float) -> None:
        if trainer.progress.step == step:
            raise KilledError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(Trainer, "_show", show)
        yield


def run(output: Path, corpus: Path, **changes: Any) -> Result:
    """A small run in this process: `RUN` with `changes`."""
    return pretrain(arguments(output, corpus, **changes))


def arguments(output: Path, corpus: Path, **changes: Any) -> PretrainArguments:
    """The arguments of `run`."""
    return PretrainArguments(**{"output": str(output), "dataset": str(corpus), **RUN, **changes})


def without_timing(output: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics without the fields that differ from run to run."""
    return [
        {name: value for name, value in line.items() if name not in ("seconds", "memory_gib", *RATES)}
        for line in read_metrics(output / "metrics.jsonl")
    ]


def assert_same_run(one: Path, other: Path, after: int = 0) -> None:
    """A run left what another one did: the metrics of updates behind `after` and the final weights, bit for bit."""
    assert without_timing(one) == [line for line in without_timing(other) if line["step"] > after]
    assert_same_weights(weights_of(one / "model"), weights_of(other / "model"))


def killed_run(output: Path, corpus: Path, step: int, **changes: Any) -> None:
    """Leaves what `run` leaves if it dies after `step` updates."""
    with killed_after(step):
        run(output, corpus, **changes)


@contextmanager
def earlier_format() -> Iterator[None]:
    """The runs inside save their checkpoints as earlier versions did: with `Accelerator.save_state`."""

    def write(self: CheckpointWriter, step: int, state: dict[str, Any], _: object, memory: CarriedMemory) -> None:
        folder = self.folder / f"step-{step:06d}"
        folder.mkdir(parents=True)
        self.accelerator.save_state(str(folder))
        memory.save(folder, self.accelerator)
        files = checksums.measure_files(folder, folder.iterdir())
        content = {"progress": state["progress"], "fingerprint": state["fingerprint"], "files": files}
        write_state(folder, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointWriter, "write", write)
        yield


def write_state(folder: Path, content: dict[str, Any]) -> None:
    """Gives a checkpoint a `state.json` that says `content`, with the checksum that belongs to it."""
    checksum = checkpoint._state_checksum(content)
    (folder / "state.json").write_text(json.dumps({**content, "checksum": checksum}))


def saved_tensors(output: Path, step: int, prefix: str) -> dict[str, Tensor]:
    """What was saved after an update under names that begin with `prefix`, by the rest of these names.

    Each process has a file with some of the tensors; none holds a part of one, unless an engine shards them.
    """
    files = (output / "checkpoints" / f"step-{step:06d}" / checkpoint.TENSORS).iterdir()
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}


def curve(output: Path, *names: str, split: str | None = None) -> list[list[Any]]:
    """The fields `names` of each line of a run's metrics."""
    return [[line.get(name) for name in names] for line in read_metrics(output / "metrics.jsonl", split)]


def losses(output: Path, split: str | None = None) -> np.ndarray:
    """Those of a run's metrics; lines about other things have none."""
    return np.array([loss for (loss,) in curve(output, "loss", split=split) if loss is not None])


def command(options: Mapping[str, Any], processes: int = 1) -> list[str]:
    """`dynattn pretrain` with `options`, under torchrun if it has several processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return [
        *(sys.executable, *(launcher if processes > 1 else ()), "-m", "dynattn.scripts.cli", "pretrain"),
        *as_options(options),
    ]


def as_options(options: Mapping[str, Any]) -> list[str]:
    """`options` as a command line."""
    values = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in options.items()}
    return [f"--{name}={value}" for name, value in values.items()]


def call(options: Mapping[str, Any], processes: int = 1, status: int | None = 0) -> str:
    """Runs `command` beside its output folder, checks its exit status unless that is None, returns its error stream."""
    done = subprocess.run(
        command(options, processes),
        env=ENVIRONMENT, cwd=Path(options["output"]).parent, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert status is None or done.returncode == status, done.stderr
    return done.stderr


def run_forked(processes: int, output: Path, corpus: Path, **changes: Any) -> None:
    """`run` in as many processes, which are copies of this one and exchange gradients.

    Raises:
        AssertionError: one of them fails; the message holds what it printed.
    """

    def work() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        run(output, corpus, **changes)

    in_processes([output.with_name(f"{output.name}-{rank}.txt") for rank in range(processes)], work)
