"""Runs of studies that only need to end."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from dynattn.scripts.compare import job
from dynattn.scripts.pretrain.guard import DivergedError


def record_training(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list to which the name of each run, such as "seed-0/plain", is added when it is trained."""
    trained: list[str] = []
    pretrain = job.pretrain

    def recorded(arguments: Any) -> Any:
        trained.append("/".join(Path(arguments.output).parts[-2:]))
        return pretrain(arguments)

    monkeypatch.setattr(job, "pretrain", recorded)
    return trained


def pretend_to_train(monkeypatch: pytest.MonkeyPatch, diverging: Collection[str]) -> list[str]:
    """Replaces training: runs end at once, those with names such as "seed-0/plain" that are `diverging` badly.

    Returns:
        A list to which the name of each run is added when it is trained.
    """
    trained: list[str] = []

    def pretrain(arguments: Any) -> None:
        folder = Path(arguments.output)
        trained.append("/".join(folder.parts[-2:]))
        folder.mkdir(parents=True)
        if trained[-1] in diverging:
            raise DivergedError("a loss of nan")
        (folder / "model").mkdir()

    def read_run(folder: Path) -> dict[str, Any]:
        validation = [{"tokens": 100 * n, "loss": 6.0 - n, "bits_per_byte": None} for n in (1, 2)]
        common = {"objective": "causal_lm", "dataset": "d", "hardware": "h", "versions": {}, "validation_targets": 9}
        sizes = {"parameters": 7, "tokens": 200, "tokens_per_second": 100.0, "learning_rate": 1e-3}
        return {"seed": int(folder.parent.name.removeprefix("seed-")), "validation": validation, **common, **sizes}

    monkeypatch.setattr(job, "pretrain", pretrain)
    monkeypatch.setattr(job, "read_run", read_run)
    return trained
