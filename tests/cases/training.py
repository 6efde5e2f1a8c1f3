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
from dynattn.scripts.pretrain import PretrainArguments, Result, pretrain
from dynattn.scripts.pretrain.main import find_shipped
from dynattn.scripts.pretrain.outputs.metrics import read_metrics
from dynattn.scripts.pretrain.results import RATES
from dynattn.scripts.pretrain.trainer import Trainer

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
        {name: value for name, value in line.items() if name not in ("seconds", *RATES)}
        for line in read_metrics(output / "metrics.jsonl")
    ]


def killed_run(output: Path, corpus: Path, step: int, **changes: Any) -> None:
    """Leaves what `run` leaves if it dies after `step` updates."""
    with killed_after(step):
        run(output, corpus, **changes)


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
