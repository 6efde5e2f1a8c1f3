"""The arguments of the study. Nothing here imports PyTorch, so that `--help` and mistakes are answered at once."""

from dataclasses import dataclass
from typing import Literal

from ...common.arguments import option
from ...common.errors import UserError
from ...common.number_ranges import check_rates, check_seconds, check_seeds

# Whether full composition solves what plain attention does, the baseline, and plain attention with twice the heads.
QUESTION = ("plain", "plain-2h", "full")
QUICK_STEPS = 100


@dataclass
class MechanismsArguments:
    """Arguments of the study.

    Raises:
        UserError: a number is out of its range, seeds repeat, or the tuning seed is a measured one.
    """

    output: str = option("runs/mechanisms", "folder of the study")
    preset: Literal["cpu", "deeper", "in-context", "gpu"] = option(
        "cpu",
        "tasks and sizes: small tasks for two layers of width 64, recall in two steps for three, the "
        "in-context families of the DCFormer paper for two, or larger tasks for four layers of width 256",
    )
    tasks: list[str] | None = option(
        None, "names of tasks (an unknown name prints all names); all of the preset if not given"
    )
    arms: list[str] | None = option(None, "names of attentions (an unknown name prints all names); all if not given")
    layers: list[int] | None = option(None, "numbers of layers; the preset's if not given")
    heads: list[int] | None = option(
        None, "numbers of heads H; the preset's if not given; several show how many heads each attention needs"
    )
    seeds: list[int] = option([0, 1, 2, 3, 4], "seeds to measure")
    tuning_seed: int = option(100, "seed on which learning rates are chosen")
    learning_rates: list[float] = option([3e-4, 1e-3, 3e-3], "peak learning rates to try for each arm and task")
    workers: int = option(1, "runs at a time, each in a process of its own with one thread")
    max_seconds: float | None = option(None, "seconds after which no run starts; the same command continues later")
    quick: bool = option(False, "three arms, two seeds, few updates and one learning rate, whatever else is given")
    redraw: bool = option(
        False, "make only record, table and plots, from the finished runs, or a record without its runs"
    )

    def __post_init__(self) -> None:
        if self.quick:
            self.seeds, self.learning_rates = [0, 1], [3e-3]
        check_seeds(self.seeds, self.tuning_seed)
        check_rates(self.learning_rates)
        check_seconds(self.max_seconds)
        if self.workers < 1 or not all(1 <= number <= 64 for number in (*(self.layers or ()), *(self.heads or ()))):
            raise UserError(
                f"workers={self.workers} must be 1 or more; layers={self.layers} and heads={self.heads} from 1 to 64"
            )
