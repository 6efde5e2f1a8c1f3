"""The arguments of the study. Nothing here imports PyTorch, so that `--help` and mistakes are answered at once."""

from dataclasses import dataclass
from typing import Any

from ....configuration.mixers import NO_COMPOSITION
from ...common.arguments import option
from ...common.errors import UserError
from ...common.number_ranges import check_rates, check_seeds

# Fields of the configuration of every arm, by the size of the study.
MODEL: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 192,
    "local_attention": 32,
}
SMALL_MODEL: dict[str, Any] = {**MODEL, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
NORMED: dict[str, Any] = {"use_qk_norm": True, "qk_norm_type": "layer_norm"}
STATIC: dict[str, Any] = {"compose_static": True}
ALL: dict[str, Any] = {**STATIC, **NORMED}
# The label of each arm, and the fields that its configuration has beside those of `MODEL`. The width of the MLP of
# `wide` is computed when it is built.
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", NO_COMPOSITION),
    "norm": ("plain, query-key norm", {**NO_COMPOSITION, **NORMED}),
    "static": ("static mixing only", {**STATIC, "compose_low_rank": False, "compose_gate": False}),
    "post": ("dynamic after the softmax", {"compose_pre": False}),
    "dynamic": ("dynamic", {}),
    "all": ("dynamic, static, query-key norm", ALL),
    "dropout": ("the same, compose_dropout 0.2", {**ALL, "compose_dropout": 0.2}),
    "wide": ("plain, wider MLP", NO_COMPOSITION),
}
QUICK: dict[str, Any] = {
    "seeds": [0, 1, 2],
    "arms": ["plain", "dynamic", "all", "wide"],
    "learning_rates": [2e-3, 4e-3, 8e-3],
    "steps": 150,
    "validations": 2,
    "small": True,
}


@dataclass
class MaskedLMArguments:
    """Arguments of the study.

    Raises:
        UserError: a number is out of its range, an arm does not exist, or seeds repeat.
    """

    output: str | None = option(None, "folder of the study; runs/masked-lm, with --quick runs/masked-lm-quick")
    dataset: str = option("builtin", "text to train on, as dynattn pretrain takes it")
    validation_dataset: str | None = option(None, "held-out text; a share of the documents if not given")
    arms: list[str] = option(list(ARMS), f"plain, and some of {', '.join(list(ARMS)[1:])}")
    seeds: list[int] = option([0, 1, 2], "seeds to measure")
    tuning_seed: int = option(100, "seed on which learning rates are chosen")
    learning_rates: list[float] = option(
        [1e-3, 2e-3, 4e-3], "peak rates to try for each arm; a single one needs no trial"
    )
    steps: int = option(1500, "updates of each run, 16 sequences of 128 tokens each")
    validations: int = option(6, "how often each run is validated")
    small: bool = option(False, "models of half the width")
    quick: bool = option(False, "fewer arms, small models and few updates, whatever else is given")
    redraw: bool = option(False, "make only table and plot, from the record")

    def __post_init__(self) -> None:
        # Before --quick replaces the arms, so that no mistyped one goes unnoticed.
        if unknown := sorted(set(self.arms) - set(ARMS)):
            raise UserError(f"arms={unknown} must be some of {', '.join(ARMS)}")
        if self.quick:
            vars(self).update(QUICK)
        self.output = self.output or ("runs/masked-lm-quick" if self.quick else "runs/masked-lm")
        if self.arms[:1] != ["plain"] or len(set(self.arms)) < len(self.arms) or len(self.arms) < 2:
            raise UserError(
                f"arms={self.arms} must be plain and after it one or more others, each once, that are compared with it"
            )
        check_seeds(self.seeds, self.tuning_seed)
        check_rates(self.learning_rates)
        if self.steps < 2 or not 1 <= self.validations <= self.steps:
            raise UserError(f"steps={self.steps} must be 2 or more, and validations={self.validations} 1 to steps")

    @property
    def model(self) -> dict[str, Any]:
        """Fields of the configuration of every arm."""
        return SMALL_MODEL if self.small else MODEL
