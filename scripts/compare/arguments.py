"""The arguments of a comparison. Nothing here imports PyTorch, so that `--help` and mistakes are answered at once."""

from dataclasses import dataclass
from typing import Any

from ..common.arguments import option
from ..common.errors import UserError
from ..common.number_ranges import check_rates, check_seconds, check_seed, check_seeds

# More runs than anybody makes of a variant.
MOST_SEEDS = 1000
TUNING_SEED = 100


@dataclass
class CompareArguments:
    """Arguments of a comparison.

    Raises:
        UserError: there are fewer than two variants or seeds, a rate is not positive, a time is negative, or the tuning
            seed is a measured one, or given without rates.
    """

    variants: list[str] = option(
        [],
        "files of arguments of dynattn pretrain, or names of its recipes; the first is the baseline; they stand before "
        "all options, or behind --variants; --redraw needs none",
    )
    output: str = option("runs/compare", "folder of all runs, the record, table and plot")
    seeds: int = option(5, "runs of each variant")
    first_seed: int = option(0, "the seed from which they count; a later one repeats a comparison on new seeds")
    common: dict[str, Any] | str | None = option(
        None,
        "arguments of dynattn pretrain for all variants, in place of those of their files: a mapping (YAML), or JSON "
        "as an option",
    )
    learning_rates: list[float] | None = option(
        None, "rates to try; each variant is compared at its best one; by default at its own"
    )
    tuning_seed: int = option(TUNING_SEED, "seed of the runs that choose learning rates, which are not compared")
    max_seconds: float | None = option(
        None, "start no run after this many seconds; seeds that all variants have finished are compared"
    )
    redraw: bool = option(False, "train nothing; make table and plot again from the record")

    def __post_init__(self) -> None:
        if len(self.variants) < 2 and not self.redraw:
            raise UserError(
                f"variants={self.variants} must be two or more, to be compared; name files of arguments, or recipes, "
                "before all options"
            )
        if not 2 <= self.seeds <= MOST_SEEDS:
            raise UserError(f"seeds={self.seeds} must be from 2 to {MOST_SEEDS}")
        check_seed("first_seed", self.first_seed)
        check_seeds(list(self.measured_seeds), self.tuning_seed)
        if self.learning_rates is not None:
            check_rates(self.learning_rates)
        elif self.tuning_seed != TUNING_SEED:
            raise UserError(f"tuning_seed={self.tuning_seed} chooses among learning_rates; give learning_rates, too")
        check_seconds(self.max_seconds)

    @property
    def measured_seeds(self) -> range:
        """The seeds of the runs that are compared."""
        return range(self.first_seed, self.first_seed + self.seeds)
