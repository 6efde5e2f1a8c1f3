"""The arguments of a comparison. Nothing here imports PyTorch, so that `--help` and mistakes are answered at once."""

import math
from dataclasses import dataclass, field
from typing import Any

from ..common.errors import UserError

# More runs than anybody makes of a variant.
MOST_SEEDS = 1000


@dataclass
class CompareArguments:
    """Arguments of a comparison.

    Raises:
        UserError: there are fewer than two variants or seeds, a rate is not positive, a time is negative, or the tuning
            seed is a measured one.
    """

    variants: list[str] = field(
        metadata={"help": "files of arguments of dynattn pretrain, or names of its recipes; the first is the baseline"}
    )
    output: str = field(default="runs/compare", metadata={"help": "folder of all runs, the record, table and plot"})
    seeds: int = field(default=5, metadata={"help": "runs of each variant; their seeds count from 0"})
    common: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "arguments of dynattn pretrain for all variants: a mapping (YAML), or JSON as an option"},
    )
    learning_rates: list[float] | None = field(
        default=None, metadata={"help": "rates to try; each variant is compared at its best one; by default at its own"}
    )
    tuning_seed: int = field(
        default=100, metadata={"help": "seed of the runs that choose learning rates, which are not compared"}
    )
    max_seconds: float | None = field(
        default=None,
        metadata={"help": "start no run after so many seconds; seeds that all variants have finished are compared"},
    )
    redraw: bool = field(default=False, metadata={"help": "train nothing; make table and plot again from the record"})

    def __post_init__(self) -> None:
        if len(self.variants) < 2:
            raise UserError(f"variants={self.variants} must be two or more files of pretraining arguments")
        if not 2 <= self.seeds <= MOST_SEEDS:
            raise UserError(f"seeds={self.seeds} must be from 2 to {MOST_SEEDS}")
        check_seeds(list(range(self.seeds)), self.tuning_seed)
        if self.learning_rates is not None:
            check_rates(self.learning_rates)
        check_seconds(self.max_seconds)


def check_seeds(seeds: list[int], tuning_seed: int) -> None:
    """Raises UserError unless there are two or more different seeds, and the tuning seed is none of them."""
    if len(seeds) < 2 or len(set(seeds)) < len(seeds):
        raise UserError(f"seeds={seeds} must be two or more different ones; a single one shows no spread")
    if tuning_seed in seeds:
        raise UserError(f"tuning_seed={tuning_seed} is one of the measured seeds={seeds}; take another")


def check_rates(learning_rates: list[float]) -> None:
    """Raises UserError unless there is at least one rate, and all are positive and finite."""
    if not learning_rates or not all(0 < rate < math.inf for rate in learning_rates):
        raise UserError(f"learning_rates={learning_rates} must be one or more positive numbers")


def check_seconds(max_seconds: float | None) -> None:
    """Raises UserError for a negative time. None is no limit, and 0 starts no run."""
    if max_seconds is not None and not max_seconds >= 0:
        raise UserError(f"max_seconds={max_seconds} must be 0 or more; leave it out for no limit")
