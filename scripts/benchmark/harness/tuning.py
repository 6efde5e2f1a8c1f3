"""Coordinate search for the fastest constants of a module on this machine.

The constants are searched one after the other, each over a few values and only once: the gain from one constant hardly
depends on the others.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ...common.errors import first_line
from .overrides import override_attributes
from .process import DeviceLostError

# The relative gain in time below which a value is not taken, because smaller differences are noise.
GAIN = 0.02
# The failure of a trial that ended its process.
ENDED = "the process ended"


@dataclass(frozen=True)
class TunableConstant:
    """A constant of a module, or one entry of a constant that is a mapping.

    Attributes:
        name: the constant's name in the module.
        values: the values to try.
        entry: key of the entry to tune, if the constant is a mapping.
    """

    name: str
    values: tuple[Any, ...]
    entry: str | None = None

    @property
    def label(self) -> str:
        return self.name if self.entry is None else f"{self.name}[{self.entry}]"

    def current(self, module: ModuleType) -> Any:
        """The value that the module has now."""
        constant = getattr(module, self.name)
        return constant if self.entry is None else constant[self.entry]


@dataclass(frozen=True)
class Tuning:
    """Outcome of a search.

    Attributes:
        best: the fastest value of each constant.
        trials: every trial with the constant's label, the value, and seconds or failure.
        finished: whether there was time for all trials.
    """

    best: dict[TunableConstant, Any]
    trials: list[dict[str, Any]]
    finished: bool

    def as_record(self) -> dict[str, Any]:
        """The outcome in JSON types."""
        best = {constant.label: value for constant, value in self.best.items()}
        return {"best": best, "finished": self.finished, "trials": self.trials}


class TrialLog:
    """The trials of a search in their order, kept where another process finds them.

    A search makes the same trials in the same order if they end the same way. One that is repeated after its process
    ended therefore takes the outcomes of its first trials from here. A trial that ended the process has failed.

    Args:
        earlier: the trials that `save` has been given last, if there are any.
        save: is given all trials before and after each one.
    """

    def __init__(
        self,
        earlier: Sequence[dict[str, Any]] = (),
        save: Callable[[list[dict[str, Any]]], None] = lambda trials: None,
    ) -> None:
        self.earlier = [one if {"seconds", "failure"} & set(one) else one | {"failure": ENDED} for one in earlier]
        self.made: list[dict[str, Any]] = []
        self.save = save

    def run(self, label: str, value: Any, trial: Callable[[], float]) -> float:
        """Makes one trial, unless it was made before, and returns its seconds, infinity if it failed."""
        if self.earlier:
            self.made.append(self.earlier.pop(0))
            return self.made[-1].get("seconds", float("inf"))
        self.made.append({"constant": label, "value": value})
        self.save(self.made)
        try:
            self.made[-1]["seconds"] = trial()
        except DeviceLostError as error:
            self.made[-1]["failure"] = first_line(error)
            raise
        except Exception as error:  # Triton raises exceptions of its own that share no base class
            self.made[-1]["failure"] = first_line(error)
        finally:
            self.save(self.made)
        return self.made[-1].get("seconds", float("inf"))


def read_tuning(record: Mapping[str, Any]) -> Tuning:
    """The outcome whose `as_record` is given."""
    best = {}
    for label, value in record["best"].items():
        name, _, entry = label.removesuffix("]").partition("[")
        best[TunableConstant(name, (), entry or None)] = tuple(value) if isinstance(value, list) else value
    return Tuning(best, record["trials"], record["finished"])


def override_constants(module: ModuleType, values: Mapping[TunableConstant, Any]) -> AbstractContextManager[None]:
    """Sets constants of `module`, and restores the original ones at the end."""
    attributes: dict[str, Any] = {}
    for constant, value in values.items():
        if constant.entry is not None:
            mapping = attributes.get(constant.name, getattr(module, constant.name))
            value = {**mapping, constant.entry: value}
        attributes[constant.name] = value
    return override_attributes(module, attributes)


def tune(
    module: ModuleType,
    constants: Sequence[TunableConstant],
    trial: Callable[[], float],
    has_time: Callable[[], bool],
    log: TrialLog,
) -> Tuning:
    """Tries the values of each constant together with the best values of the constants before it.

    Args:
        trial: returns the seconds of a run with the constants that the module has; an exception means that the run
            fails, or that its results are wrong, with these constants.
        has_time: whether there is time for one more trial.
        log: takes the trials.
    """
    first = len(log.made)

    def attempt(values: Mapping[TunableConstant, Any], label: str, value: Any) -> float:
        with override_constants(module, values):
            return log.run(label, value, trial)

    best = {constant: constant.current(module) for constant in constants}
    fastest = attempt(best, "as it is", None)
    for constant in constants:
        for value in constant.values:
            if value == constant.current(module):
                continue
            if not has_time():
                return Tuning(best, log.made[first:], finished=False)
            seconds = attempt({**best, constant: value}, constant.label, value)
            if seconds < fastest * (1 - GAIN):
                best[constant], fastest = value, seconds
    return Tuning(best, log.made[first:], finished=True)
