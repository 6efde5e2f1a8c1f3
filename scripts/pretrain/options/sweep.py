"""The option `--sweep`: the number in which the runs of a sweep differ, and its values."""

import math
import re
from dataclasses import dataclass, fields

from ...common.errors import UserError
from .optimization import OptimizationOptions

SHORT_NAMES = {"lr": "learning_rate"}
NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?"
MOST_RUNS = 1000
# Numbers that leave the weights as they are whose losses a sweep compares: those after the last update.
UNCOMPARED = ("ema_decay",)


@dataclass(frozen=True)
class Sweep:
    """Values of one option, ascending by equal factors.

    Attributes:
        name: name of the option.
        values: two values or more.
    """

    name: str
    values: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> "Sweep":
        """Reads `NAME=FIRST:LAST:COUNT`; `lr` is short for `learning_rate`.

        Raises:
            UserError: the option is no number of the optimization that changes the loss, or the values are not
                positive, ascending and different in their first three digits.
        """
        match = re.fullmatch(rf"(\w+)=({NUMBER}):({NUMBER}):([0-9]{{1,9}})", text.lower())
        if match is None:
            raise UserError(f"sweep={text} must be NAME=FIRST:LAST:COUNT, like lr=1e-4:1e-2:7")
        name = SHORT_NAMES.get(match[1], match[1])
        numbers = [field.name for field in fields(OptimizationOptions) if "float" in str(field.type)]
        known = [number for number in numbers if number not in UNCOMPARED]
        if name not in known:
            raise UserError(f"sweep={text}: {name} is none of {', '.join(known)}")
        first, last, count = float(match[2]), float(match[3]), int(match[4])
        if not (0 < first < last and last / first < math.inf and 2 <= count <= MOST_RUNS):
            raise UserError(f"sweep={text} must go up from a positive number, in 2 to {MOST_RUNS} runs")
        exact = (first * (last / first) ** (index / (count - 1)) for index in range(count))
        # Rounded to what a user would write, because names of folders and messages contain them.
        values = tuple(float(f"{value:.3g}") for value in exact)
        if len(set(values)) < count:
            raise UserError(f"sweep={text} has values that are equal to three digits; make fewer runs, or go further")
        return cls(name, values)
