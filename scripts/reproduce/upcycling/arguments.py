"""The arguments of the study. Nothing here imports PyTorch, so that `--help` and mistakes are answered at once."""

from dataclasses import dataclass
from typing import Any, Literal

from ...common.arguments import option
from ...common.errors import UserError
from ...common.number_ranges import check_rates, check_seeds
from ..texts import check_texts, text_options

HEADS = 8  # of every parent
QUICK: dict[str, Any] = {"seeds": [0, 1], "parent_steps": 60, "steps": 24, "learning_rates": [2e-3]}


@dataclass
class UpcyclingArguments:
    """Arguments of the study.

    Raises:
        UserError: a number is out of its range, seeds repeat, the tuning seed is a measured one, or one of two texts is
            missing.
    """

    output: str | None = option(None, "folder of the study; runs/upcycling, with --quick runs/upcycling-quick")
    parent: Literal["gpt_neox", "mixtral"] = option("gpt_neox", "type of the parents")
    hidden_size: int = option(128, f"width of the parents, which have {HEADS} heads")
    arms: list[str] | None = option(
        None, "names of arms to compare with plain (an unknown name prints all names); all if not given"
    )
    seeds: list[int] = option([0, 1, 2, 3, 4], "seeds to measure")
    tuning_seed: int = option(100, "seed on which learning rates are chosen")
    learning_rates: list[float] = option(
        [1e-3, 2e-3, 4e-3, 8e-3],
        "peak rates to try, separately for plain and composed models; a single one needs no trial",
    )
    parent_steps: int = option(400, "updates of each parent, 1,024 tokens each")
    steps: int = option(200, "updates of each run that continues a parent")
    dataset: str = option("builtin", "text to train on: builtin, or files such as WikiText-2")
    validation_dataset: str | None = option(None, "text to validate on, for other texts")
    quick: bool = option(False, "two seeds, few updates and one learning rate, whatever else is given")
    redraw: bool = option(False, "make only table and plot, from the record")

    def __post_init__(self) -> None:
        if self.quick:
            vars(self).update(QUICK)
        self.output = self.output or ("runs/upcycling-quick" if self.quick else "runs/upcycling")
        check_seeds(self.seeds, self.tuning_seed)
        check_rates(self.learning_rates)
        check_texts(self.dataset, self.validation_dataset)
        if self.hidden_size < 8 * HEADS or self.hidden_size % (8 * HEADS):
            raise UserError(f"hidden_size={self.hidden_size} must be a multiple of {8 * HEADS}: 8 channels for a head")
        if self.parent_steps < 1 or self.steps < 2:
            raise UserError(f"parent_steps={self.parent_steps} must be 1 or more, and steps={self.steps} 2 or more")

    @property
    def texts(self) -> dict[str, Any]:
        """The options of `dynattn pretrain` that name the texts."""
        return text_options(self.dataset, self.validation_dataset)
