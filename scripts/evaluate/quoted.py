"""Published scores of Pythia models, which are shown beside measured ones in rows that are marked as quoted."""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.errors import UserError

DATA = Path(__file__).with_name("quoted_pythia.json")
NEAREST = "nearest"


@dataclass(frozen=True)
class Quoted:
    """A score that somebody else measured."""

    model: str
    task: str
    num_fewshot: int
    metric: str
    value: float
    stderr: float


def quoted_scores(names: Sequence[str], parameters: int) -> list[Quoted]:
    """The published scores of the models that are named; "nearest" stands for the one with the nearest size.

    Args:
        parameters: number of parameters of the model that was scored.

    Raises:
        UserError: no scores of a name are known.
    """
    check_quoted(names)
    models = _data()["models"]
    chosen = [_nearest(list(models), parameters) if name == NEAREST else name for name in names]
    return [
        Quoted(model, task, int(shots), metric, value, stderr)
        for model in dict.fromkeys(chosen)
        for shots, tasks in models[model].items()
        for task, metrics in tasks.items()
        for metric, (value, stderr) in metrics.items()
    ]


def check_quoted(names: Sequence[str]) -> None:
    """Raises UserError if no scores of a name are known."""
    known = (NEAREST, *_data()["models"])
    if unknown := sorted(set(names) - set(known)):
        raise UserError(f"no scores of {unknown} are quoted; choose from {', '.join(known)}")


def quoted_source() -> str:
    """Where the scores are published."""
    return str(_data()["source"])


def _nearest(models: Sequence[str], parameters: int) -> str:
    """The model whose size, as its name gives it, is nearest to `parameters` by ratio."""
    units = {"m": 1e6, "b": 1e9}

    def distance(model: str) -> float:
        size = float(model.rpartition("-")[2][:-1]) * units[model[-1]]
        return max(size / parameters, parameters / size)

    return min(models, key=distance)


@functools.cache
def _data() -> dict[str, Any]:
    return json.loads(DATA.read_text(encoding="utf-8"))
