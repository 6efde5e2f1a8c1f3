"""The runs of the study: presets, and the key that names a run and its file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .arms import Size
from .tasks import LARGE, TASKS, Task

# A model that is right this often has solved its task.
SOLVED = 0.99


@dataclass(frozen=True)
class Preset:
    """How every model of a study is trained and scored.

    Attributes:
        batch: sequences of an update, all of them fresh.
        steps: updates after which a run ends whether it has solved its task or not.
        score_every: updates between two scores.
        held_out: sequences that every score asks about, the same for all runs of a task.
    """

    size: Size
    tasks: Mapping[str, Task]
    batch: int
    steps: int
    score_every: int = 50
    held_out: int = 256


PRESETS = {
    "cpu": Preset(Size(64, heads=4, head_dim=16, layers=2), TASKS, batch=32, steps=1500),
    "gpu": Preset(Size(256, heads=8, head_dim=32, layers=4), LARGE, batch=256, steps=10_000, score_every=200),
}


@dataclass(frozen=True)
class Run:
    """One model of the study."""

    task: str
    arm: str
    layers: int
    seed: int
    learning_rate: float

    @property
    def file_name(self) -> str:
        return f"{self.task}/{self.arm}-{self.layers}-layers-seed-{self.seed}-{self.learning_rate:g}.json"

    def settings(self) -> dict[str, Any]:
        """What the run is, for its record."""
        return asdict(self)


def tuning_runs(
    tasks: Sequence[str], arms: Sequence[str], layers: Sequence[int], seed: int, rates: Sequence[float]
) -> Iterator[Run]:
    """The runs by which each arm gets its learning rate for a task; none if there is nothing to choose."""
    for task in tasks if len(rates) > 1 else ():
        for count in layers:
            for arm in arms:
                yield from (Run(task, arm, count, seed, rate) for rate in rates)


def measured_runs(
    tasks: Sequence[str], arms: Sequence[str], layers: Sequence[int], seeds: Sequence[int], rates: Mapping[Any, float]
) -> Iterator[Run]:
    """The runs that count, all arms of a seed before the next seed, so that an unfinished study is balanced.

    Args:
        rates: learning rates by (task, arm, layers).
    """
    for seed in seeds:
        for task in tasks:
            for count in layers:
                yield from (Run(task, arm, count, seed, rates[task, arm, count]) for arm in arms)
