"""The arguments of the study. Nothing here imports PyTorch, so that `--help` and mistakes are answered at once."""

from dataclasses import dataclass
from typing import Any

from ...common.arguments import option
from ...common.errors import UserError
from ...common.number_ranges import check_rates, check_seeds
from ...common.option_values import parse_mapping
from ..texts import check_texts, text_options

# Types of parents that the study trains itself. Any other parent is the name of a trained model.
TRAINED_HERE = ("gpt_neox", "mixtral")
HEADS = 8  # of every parent that the study trains
# Arguments of `dynattn pretrain` that `common` cannot have.
DECIDED = {
    *("output", "seed", "max_steps", "init_from", "model_type", "model_size", "model_config", "learning_rate"),
    *("composition_learning_rate", "freeze_parent_steps", "dataset", "validation_dataset"),
}
QUICK: dict[str, Any] = {"seeds": [0, 1], "parent_steps": 60, "steps": 24, "learning_rates": [2e-3]}


@dataclass
class UpcyclingArguments:
    """Arguments of the study.

    Raises:
        UserError: a number is out of its range, seeds repeat, the tuning seed is a measured one, one of two texts is
            missing, `common` is no mapping, or there is an option that a trained parent decides.
    """

    output: str | None = option(None, "folder of the study; runs/upcycling, with --quick runs/upcycling-quick")
    parent: str = option(
        "gpt_neox",
        f"{' or '.join(TRAINED_HERE)}, of which a parent is trained for each seed; or a trained causal model, the same "
        "for all seeds: a folder or a name on the Hub",
    )
    hidden_size: int = option(128, f"width of parents that are trained here, which have {HEADS} heads")
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
    common: dict[str, Any] | str | None = option(
        None, "further arguments of dynattn pretrain for all runs, as JSON, such as '{\"batch_size\": 2}'"
    )
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
        self._check_trained_parent()
        if decided := sorted(DECIDED & self.for_all.keys()):
            raise UserError(f"common has {', '.join(decided)}, which the study decides; leave it out")

    def _check_trained_parent(self) -> None:
        decided = [name for name in ("hidden_size", "parent_steps") if getattr(self, name) != getattr(type(self), name)]
        if not self.quick and decided and not self.trains_parents:
            raise UserError(f"{' and '.join(decided)} of the parent {self.parent} are known; leave the option out")

    @property
    def for_all(self) -> dict[str, Any]:
        """The arguments of `dynattn pretrain` in `common`, by name.

        Raises:
            UserError: `common` is no mapping.
        """
        return parse_mapping("common", self.common) or {}

    @property
    def trains_parents(self) -> bool:
        """Whether each seed has a parent of its own, trained by the study."""
        return self.parent in TRAINED_HERE

    @property
    def texts(self) -> dict[str, Any]:
        """The options of `dynattn pretrain` that name the texts."""
        return text_options(self.dataset, self.validation_dataset)
