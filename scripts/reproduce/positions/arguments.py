"""The arguments of the study. Nothing here imports PyTorch, so that `--help` and mistakes are answered at once."""

from dataclasses import dataclass
from typing import Any

from ...common.arguments import option
from ...common.errors import UserError
from ...common.number_ranges import check_rates, check_seconds, check_seeds

TASKS = ("copy-one", "copy-many", "sort", "sum", "reverse", "parity", "addition", "addition-reversed")
MAIN = ("none", "t5", "alibi", "rope", "sinusoidal")
# What the configuration of each scheme's model has.
SCHEMES: dict[str, dict[str, Any]] = {
    **{name: {"position_scheme": name} for name in MAIN},
    "rope-quarter": {"rope_parameters": {"partial_rotary_factor": 0.25}},
    "rope-base-2e7": {"rope_parameters": {"rope_theta": 2e7}},
    # `truncate_length` is the longest training input.
    "truncated": {"rope_parameters": {"rope_type": "truncated"}},
    "rope-none": {
        "position_scheme": {"sliding_attention": "rope", "full_attention": "none"},
        "sliding_window": 16,
    },
    "alibi-composed": {"position_scheme": "alibi", "compose_position_bias": True},
    "carope": {"position_scheme": "carope"},
    "t5-gain": {"position_scheme": "t5", "position_gain": "bucket"},
}
QUICK: dict[str, Any] = {
    "tasks": ["copy-one"],
    "schemes": ["none", "t5", "alibi", "rope"],
    "seeds": [0, 1],
    "learning_rates": [2e-3],
    "steps": 1000,
    "layers": 2,
    "longest": 10,
    "wide": [],
}


@dataclass
class PositionsArguments:
    """Arguments of the study.

    Raises:
        UserError: a number is out of its range, a name does not exist, or seeds repeat.
    """

    output: str | None = option(None, "folder of the study; runs/positions, with --quick runs/positions-quick")
    tasks: list[str] = option(list(TASKS[:4]), f"some of {', '.join(TASKS)}")
    schemes: list[str] = option(list(MAIN), f"some of {', '.join(SCHEMES)}")
    wide: list[str] = option(["none"], "schemes that also get a plain model with a wider MLP, as large as the composed")
    seeds: list[int] = option([0, 1, 2], "seeds to measure")
    tuning_seed: int = option(100, "seed on which learning rates are chosen")
    learning_rates: list[float] = option(
        [1e-3, 2e-3, 4e-3], "peak rates to try, separately for plain and composed models; a single one needs no trial"
    )
    steps: int = option(3000, "updates of each run, 64 examples of one length each")
    layers: int = option(4, "layers of each model")
    longest: int = option(0, "longest trained length; 0: 20 for copying and reversing, 8 for the others")
    workers: int = option(1, "runs at a time, each in a process of its own with one thread")
    max_seconds: float | None = option(None, "seconds after which no run starts; the same command continues later")
    quick: bool = option(False, "16 small runs of copy-one, whatever else is given")
    redraw: bool = option(False, "make only table and plot, from the record")

    def __post_init__(self) -> None:
        self._check_names()  # also those that --quick replaces, so that no mistyped one goes unnoticed
        if self.quick:
            vars(self).update(QUICK)
        self.output = self.output or ("runs/positions-quick" if self.quick else "runs/positions")
        if set(self.wide) - set(self.schemes):
            raise UserError(f"wide={self.wide} must be some of the schemes {self.schemes}")
        if "rope-none" in self.schemes and self.layers < 2:
            raise UserError(f"rope-none needs 2 layers, one of each type, and layers={self.layers}")
        check_seeds(self.seeds, self.tuning_seed)
        check_rates(self.learning_rates)
        check_seconds(self.max_seconds)
        if self.steps < 2 or min(self.layers, self.workers) < 1 or not 0 <= self.longest <= 20:
            raise UserError(
                f"steps={self.steps} must be 2 or more, layers={self.layers} and workers={self.workers} 1 or more, "
                f"longest={self.longest} 0 to 20"
            )

    def _check_names(self) -> None:
        """Refuses names that do not exist, and a study without any task or scheme; `wide` may be empty.

        A name that is given twice counts once: the runs of its cells would be twice in the statistics.
        """
        for name, known in (("tasks", TASKS), ("schemes", tuple(SCHEMES)), ("wide", tuple(SCHEMES))):
            given = getattr(self, name)
            unknown = sorted(set(given) - set(known))
            if unknown or (not given and name != "wide"):
                raise UserError(f"{name}={unknown or given} must be some of {', '.join(known)}")
            setattr(self, name, list(dict.fromkeys(given)))
