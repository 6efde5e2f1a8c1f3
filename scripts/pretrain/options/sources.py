"""The sources of a mixture of training data."""

import math
import re
from dataclasses import dataclass, fields
from typing import Any

from ...common.errors import UserError
from ...common.number_ranges import require
from ...common.option_values import with_home


@dataclass(frozen=True)
class SourceOptions:
    """One source of the training data.

    Attributes:
        dataset: where the data is, as in the argument `dataset`.
        weight: its share of the sequences, relative to the weights of the other sources.
        epochs: how often it is read in a run of one epoch; given instead of a weight.
        max_epochs: a run that would read it more often is refused.
    """

    dataset: str
    weight: float | None = None
    epochs: float | None = None
    max_epochs: float | None = None


def parse_source(name: Any, options: Any) -> SourceOptions:
    """Checks one entry of a mixture.

    Raises:
        UserError: its name or an option is not valid.
    """
    known = {argument.name for argument in fields(SourceOptions)}
    if not isinstance(options, dict) or not options.get("dataset") or options.keys() - known:
        raise UserError(f"mixture.{name}={options!r} must be a mapping of {', '.join(sorted(known))}, with dataset")
    if not isinstance(name, str):
        raise UserError(f"mixture.{name}: a source's name is a text; put it in quotes")
    if not re.fullmatch(r"(?!\.+$)[\w.-]+", name):
        raise UserError(f"mixture.{name}: a source's name has letters, digits, dots and dashes, and not dots alone")
    numbers = {key: options[key] for key in ("weight", "epochs", "max_epochs") if options.get(key) is not None}
    for key, number in numbers.items():
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        require(is_number and 0 < number < math.inf, f"mixture.{name}.{key}", number, "a positive number")
    if ("weight" in numbers) == ("epochs" in numbers):
        raise UserError(f"mixture.{name} needs either weight or epochs; give one of them")
    return SourceOptions(with_home(str(options["dataset"])), **numbers)
