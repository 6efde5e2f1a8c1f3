"""The arguments of a study of arms. Nothing here imports PyTorch, so that mistakes are told at once."""

from dataclasses import dataclass

from ...common.arguments import option
from ...common.number_ranges import check_positive, check_rates, check_seconds, check_seeds

RATES = [1e-3, 3e-3, 9e-3]
# Small models that are trained shortly learn best with larger ones.
QUICK_RATES = [3e-3, 9e-3, 27e-3]


@dataclass
class PairedStudyArguments:
    """Arguments of a study.

    Raises:
        UserError: a number is out of its range, seeds repeat, or the tuning seed is a measured one.
    """

    output: str | None = option(None, "folder of the study; by default runs/seq2seq or runs/vision, after its name")
    tasks: list[str] | None = option(None, "names of tasks (an unknown name prints all names); all if not given")
    arms: list[str] | None = option(None, "names of arms (an unknown name prints all names); all if not given")
    seeds: list[int] = option([0, 1, 2], "seeds to measure")
    tuning_seed: int = option(100, "seed on which learning rates are chosen")
    learning_rates: list[float] | None = option(
        None,
        "peak learning rates to try for each arm and task; by default "
        f"{' '.join(map(str, RATES))}, with --quick {' '.join(map(str, QUICK_RATES))}",
    )
    workers: int = option(1, "runs at a time, each in a process of its own with one thread")
    max_seconds: float | None = option(None, "seconds after which no run starts; the same command continues later")
    quick: bool = option(False, "smaller models, fewer examples and updates")
    redraw: bool = option(False, "make only record, table and plot, from the finished runs")

    def __post_init__(self) -> None:
        check_seeds(self.seeds, self.tuning_seed)
        check_rates(self.rates)
        check_seconds(self.max_seconds)
        check_positive(self, ["workers"])

    @property
    def rates(self) -> list[float]:
        """The peaks to choose from."""
        if self.learning_rates is not None:
            return self.learning_rates
        return QUICK_RATES if self.quick else RATES
