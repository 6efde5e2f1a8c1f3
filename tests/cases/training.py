"""Small pretraining runs: their text, runs that are killed, loss curves, and runs in processes of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dynattn.scripts.common.arguments import parse_arguments
from dynattn.scripts.pretrain import PretrainArguments
from dynattn.scripts.pretrain.main import find_shipped
from dynattn.scripts.pretrain.outputs.metrics import read_metrics
from dynattn.scripts.pretrain.trainer import Trainer

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}


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


def curve(output: Path, *names: str, split: str | None = None) -> list[list[Any]]:
    """The fields `names` of each line of a run's metrics."""
    return [[line.get(name) for name in names] for line in read_metrics(output / "metrics.jsonl", split)]


def command(options: Mapping[str, Any], processes: int = 1) -> list[str]:
    """`dynattn pretrain` with `options`, under torchrun if it has several processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    values = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in options.items()}
    return [
        *(sys.executable, *(launcher if processes > 1 else ()), "-m", "dynattn.scripts.cli", "pretrain"),
        *(f"--{name}={value}" for name, value in values.items()),
    ]


def call(options: Mapping[str, Any], processes: int = 1, status: int | None = 0) -> str:
    """Runs `command` beside its output folder, checks its exit status unless that is None, returns its error stream."""
    done = subprocess.run(
        command(options, processes),
        env=ENVIRONMENT, cwd=Path(options["output"]).parent, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert status is None or done.returncode == status, done.stderr
    return done.stderr
