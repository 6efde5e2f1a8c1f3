"""The arguments of the study. Nothing here imports PyTorch, so that `--help` and mistakes are answered at once."""

from dataclasses import dataclass
from typing import Literal

from ...common.arguments import option
from ...common.errors import UserError
from ...compare.arguments import TUNING_SEED, CompareArguments
from ..texts import check_texts


@dataclass
class AblationsArguments:
    """Arguments of the study; `CompareArguments` checks those that it shares.

    Raises:
        UserError: only one of the two texts is given, or a rate of the composition that no variant has.
    """

    size: Literal["small", "medium", "large"] = option("small", "models of about 0.25, 1.2 or 5.6 million parameters")
    output: str | None = option(None, "folder of the study; runs/ablations-SIZE")
    variants: list[str] | None = option(
        None, "names of variants, the baseline first (an unknown name prints all names); all if not given"
    )
    seeds: int = option(3, "runs of each variant")
    first_seed: int = option(0, "the seed from which they count; a later one repeats the study on new seeds")
    learning_rates: list[float] | None = option(
        None, "peak learning rates to try for each variant; the size's if not given"
    )
    composition_learning_rate: float | None = option(
        None, "adds a variant NAME-slow for each NAME that composes, whose composition learns at this peak rate"
    )
    tuning_seed: int = option(TUNING_SEED, "seed on which learning rates are chosen")
    dataset: str = option("builtin", "text to train on: builtin, or files such as WikiText-2")
    validation_dataset: str | None = option(None, "text to validate on, for other texts")
    max_steps: int | None = option(None, "updates of each run; the size's if not given")
    max_seconds: float | None = option(
        None, "seconds after which no run starts; the seeds that all variants have finished are compared"
    )
    redraw: bool = option(False, "make only table and plot, from the record")

    def __post_init__(self) -> None:
        self.output = self.output or f"runs/ablations-{self.size}"
        check_texts(self.dataset, self.validation_dataset)
        rate, names = self.composition_learning_rate, self.variants
        if rate is not None and names is not None and not any(name.endswith("-slow") for name in names):
            raise UserError(
                f"composition_learning_rate ({rate}) is that of variants NAME-slow, but variants are "
                f"{' '.join(names)}; add one, such as {names[-1]}-slow, or leave the rate out"
            )

    def compared(self, names: list[str]) -> CompareArguments:
        """What `dynattn compare` is told of the same study.

        Raises:
            UserError: there are fewer than two variants or seeds, or a rate or the tuning seed is wrong.
        """
        same = ("seeds", "first_seed", "learning_rates", "tuning_seed", "max_seconds", "redraw")
        return CompareArguments(variants=names, output=str(self.output), **{name: getattr(self, name) for name in same})
