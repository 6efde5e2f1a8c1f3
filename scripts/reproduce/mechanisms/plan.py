"""The runs of the study: presets, and the key that names a run and its file."""

from collections.abc import Mapping
from dataclasses import dataclass

from .arms import Size
from .in_context import IN_CONTEXT
from .tasks import DEEPER, LARGE, TASKS, Task

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
    score_every: int = 20
    held_out: int = 256


PRESETS = {
    "cpu": Preset(Size(64, heads=4, head_dim=16, layers=2), TASKS, batch=32, steps=2000),
    "in-context": Preset(Size(64, heads=4, head_dim=16, layers=2), IN_CONTEXT, batch=32, steps=4000),
    "deeper": Preset(Size(64, heads=4, head_dim=16, layers=3), DEEPER, batch=32, steps=4000),
    "gpu": Preset(Size(256, heads=8, head_dim=32, layers=4), LARGE, batch=256, steps=10_000, score_every=200),
}


# What arms share when they are compared: the task, the layers, and the heads of all but those with twice as many.
Place = tuple[str, int, int]
Cell = tuple[Place, str]


@dataclass(frozen=True)
class Run:
    """One model of the study."""

    task: str
    arm: str
    layers: int
    heads: int
    seed: int
    learning_rate: float

    @property
    def place(self) -> Place:
        """What it is compared at."""
        return self.task, self.layers, self.heads

    @property
    def cell(self) -> Cell:
        """Identifies the runs that share a learning rate."""
        return self.place, self.arm

    @property
    def file_name(self) -> str:
        sizes = f"{self.layers}-layers-{self.heads}-heads"
        return f"{self.task}/{self.arm}-{sizes}-seed-{self.seed}-{self.learning_rate:g}.json"
