"""Finds which constants of a module are fastest on this machine: one after the other, each from a few candidates.

The first pass over the constants is the only one: what a candidate gains is mostly its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ...common.errors import first_line

# A candidate must be this much faster to be taken: less is noise.
GAIN = 0.02


@dataclass(frozen=True)
class Knob:
    """A constant of a module, or an entry of one that is a mapping, and what to try in its place."""

    constant: str
    candidates: tuple[Any, ...]
    entry: str | None = None

    @property
    def label(self) -> str:
        return self.constant if self.entry is None else f"{self.constant}[{self.entry}]"

    def value(self, module: ModuleType) -> Any:
        """What the module has."""
        constant = getattr(module, self.constant)
        return constant if self.entry is None else constant[self.entry]


@dataclass(frozen=True)
class Tuning:
    """The values found, by knob, and what was tried on the way to them: label, value, seconds or failure."""

    best: dict[Knob, Any]
    trials: list[dict[str, Any]]
    finished: bool

    def as_record(self) -> dict[str, Any]:
        """For a JSON file."""
        best = {knob.label: value for knob, value in self.best.items()}
        return {"best": best, "finished": self.finished, "trials": self.trials}


@contextmanager
def using(module: ModuleType, values: Mapping[Knob, Any]) -> Iterator[None]:
    """Gives constants other values for a while."""
    kept = {knob.constant: getattr(module, knob.constant) for knob in values}
    try:
        for knob, value in values.items():
            new = value if knob.entry is None else {**getattr(module, knob.constant), knob.entry: value}
            setattr(module, knob.constant, new)
        yield
    finally:
        for constant, value in kept.items():
            setattr(module, constant, value)


def tune(module: ModuleType, knobs: Sequence[Knob], trial: Callable[[], float], has_time: Callable[[], bool]) -> Tuning:
    """Tries the candidates of each knob with the best values of those before it.

    Args:
        trial: seconds of a run with the constants that the module has; an exception says that it does not run, or not
            rightly, with them.
        has_time: whether there is any for one more trial.
    """
    best = {knob: knob.value(module) for knob in knobs}
    trials: list[dict[str, Any]] = []
    fastest = _try(module, best, "as it is", None, trial, trials)
    for knob in knobs:
        for candidate in knob.candidates:
            if candidate == knob.value(module):
                continue
            if not has_time():
                return Tuning(best, trials, finished=False)
            seconds = _try(module, {**best, knob: candidate}, knob.label, candidate, trial, trials)
            if seconds < fastest * (1 - GAIN):
                best[knob], fastest = candidate, seconds
    return Tuning(best, trials, finished=True)


def _try(
    module: ModuleType,
    values: Mapping[Knob, Any],
    label: str,
    value: Any,
    trial: Callable[[], float],
    trials: list[dict[str, Any]],
) -> float:
    trials.append({"constant": label, "value": value})
    try:
        with using(module, values):
            trials[-1]["seconds"] = trial()
    except Exception as error:  # Triton's are of its own kind
        trials[-1]["failure"] = first_line(error)
    return trials[-1].get("seconds", float("inf"))
