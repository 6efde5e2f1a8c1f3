"""Ranges of numbers that several jobs take. Nothing here imports PyTorch, so that mistakes are told at once."""

import math
from collections.abc import Iterable

from .errors import UserError

# NumPy takes seeds below 2**32, and each process adds its number.
LARGEST_SEED = 2**32 - 2**16


def require(condition: bool, name: str, value: object, limit: str) -> None:
    """Raises UserError with the name, the value and its `limit`, unless `condition` holds."""
    if not condition:
        raise UserError(f"{name}={value} must be {limit}")


def check_positive(options: object, names: Iterable[str]) -> None:
    """Raises UserError if an attribute of `options` among `names` is neither None nor positive and finite."""
    for name in names:
        value = getattr(options, name)
        require(value is None or 0 < value < math.inf, name, value, "a positive number")


def check_seed(name: str, seed: int) -> None:
    """Raises UserError unless each library that draws random numbers takes the seed."""
    require(0 <= seed <= LARGEST_SEED, name, seed, f"between 0 and {LARGEST_SEED}")


def check_seeds(seeds: list[int], tuning_seed: int) -> None:
    """Raises UserError unless there are two or more different seeds, and the tuning seed is none of them."""
    are_different = 2 <= len(seeds) == len(set(seeds))
    require(are_different, "seeds", seeds, "two or more different ones; a single one shows no spread")
    if tuning_seed in seeds:
        raise UserError(f"tuning_seed={tuning_seed} is one of the measured seeds={seeds}; take another")
    for seed in seeds:
        check_seed("seeds", seed)
    check_seed("tuning_seed", tuning_seed)


def check_rates(learning_rates: list[float]) -> None:
    """Raises UserError unless there is at least one rate, all are positive and finite, and no two are told alike."""
    if not learning_rates or not all(0 < rate < math.inf for rate in learning_rates):
        raise UserError(f"learning_rates={learning_rates} must be one or more positive numbers")
    if len({f"{rate:g}" for rate in learning_rates}) < len(learning_rates):
        raise UserError(
            f"learning_rates={learning_rates} must differ in their first six digits; leave repeated ones out"
        )


def check_seconds(max_seconds: float | None) -> None:
    """Raises UserError for a negative time. None is no limit, and 0 starts no run."""
    require(max_seconds is None or max_seconds >= 0, "max_seconds", max_seconds, "0 or more; leave it out for no limit")
