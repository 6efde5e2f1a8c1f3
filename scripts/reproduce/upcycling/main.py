"""Does a plain model that learns to compose its heads end better than one that is only trained further?

    dynattn reproduce upcycling [--quick]

For every seed (initial weights and order of the data) a small GPT-NeoX is trained on the built-in corpus and upcycled
as `dynattn convert pythia` does. Then it is continued on equal tokens in equal order: as it is, composed, composed with
a higher learning rate for the composition, and composed with the parent's weights frozen at first. The learning rates
of the first two are chosen on a seed that is not measured; the others take over the second one's. An interrupted study
goes on where it stopped; finished runs are not repeated.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...common.arguments import parse_arguments
from ...common.atomic_file import write_json, write_whole
from ...common.errors import UserError
from ..plots import draw_arms
from .record import Record, make_record, read_run, table
from .runs import ARMS, Runs

QUICK: dict[str, Any] = {"seeds": [0, 1], "parent_steps": 60, "steps": 24, "learning_rates": [2e-3]}
SETTINGS, RECORD, TABLE, PLOT = "study.json", "record.json", "table.md", "losses.png"


@dataclass
class UpcyclingArguments:
    """Arguments of the study.

    Raises:
        UserError: a number is out of its range, seeds repeat, or the tuning seed is a measured one.
    """

    output: str | None = field(
        default=None, metadata={"help": "folder of the study; runs/upcycling, with --quick runs/upcycling-quick"}
    )
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2, 3, 4], metadata={"help": "seeds to measure"})
    tuning_seed: int = field(default=100, metadata={"help": "seed on which learning rates are chosen"})
    learning_rates: list[float] = field(
        default_factory=lambda: [1e-3, 2e-3, 4e-3, 8e-3],
        metadata={"help": "peaks to choose from, plain and composed each for itself; one needs no choice"},
    )
    parent_steps: int = field(default=400, metadata={"help": "updates of each parent, 1,024 tokens each"})
    steps: int = field(default=200, metadata={"help": "updates of each run that continues a parent"})
    quick: bool = field(
        default=False, metadata={"help": "two seeds, few updates and one learning rate, whatever else is given"}
    )
    redraw: bool = field(default=False, metadata={"help": "only make table and plot again, from the record"})

    def __post_init__(self) -> None:
        if self.quick:
            vars(self).update(QUICK)
        self.output = self.output or ("runs/upcycling-quick" if self.quick else "runs/upcycling")
        if len(self.seeds) < 2 or len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"seeds={self.seeds} must be two or more different ones; a single one shows no spread")
        if self.tuning_seed in self.seeds:
            raise UserError(f"tuning_seed={self.tuning_seed} is one of the measured seeds={self.seeds}; take another")
        if not self.learning_rates or min(self.learning_rates) <= 0:
            raise UserError(f"learning_rates={self.learning_rates} must be one or more positive numbers")
        if self.parent_steps < 1 or self.steps < 2:
            raise UserError(f"parent_steps={self.parent_steps} must be 1 or more, and steps={self.steps} 2 or more")


def main(argv: Sequence[str]) -> int:
    """Runs what is missing of the study, then writes and prints what came out."""
    arguments = parse_arguments(UpcyclingArguments, argv, prog="dynattn reproduce upcycling", description=__doc__)
    output = Path(str(arguments.output))
    if not arguments.redraw:
        record = run_study(arguments, output)
        record["command"] = command_of(arguments)
        write_json(output / RECORD, record, indent=1)
    print(f"\n{draw(output)}\n\n{output}: {RECORD}, {TABLE}, {PLOT}")
    return 0


def command_of(arguments: UpcyclingArguments) -> str:
    """The command line that repeats the study, wherever its folder is."""
    words = ["dynattn", "reproduce", "upcycling"]
    for name in ("seeds", "tuning_seed", "learning_rates", "parent_steps", "steps"):
        value = getattr(arguments, name)
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return " ".join(words)


def run_study(arguments: UpcyclingArguments, output: Path) -> Record:
    """Trains what has not been trained yet and returns the record.

    Raises:
        UserError: the folder holds a study with other settings, or a run failed.
    """
    runs = Runs(output, arguments.parent_steps, arguments.steps)
    claim(output, runs.settings())
    rates, losses = choose_rates(arguments, runs)
    tuning = {"tuning_seed": arguments.tuning_seed, "learning_rates": arguments.learning_rates, "tuning_losses": losses}
    measured = {
        seed: {name: runs.continued(seed, name, rate) for name, rate in rates.items()} for seed in arguments.seeds
    }
    return make_record(
        {**runs.settings(), **tuning, "chosen": rates},
        parents=[read_run(runs.parent(seed)) for seed in arguments.seeds],
        arms={name: [read_run(measured[seed][name]) for seed in arguments.seeds] for name in ARMS},
        labels={name: arm.label for name, arm in ARMS.items()},
    )


def choose_rates(arguments: UpcyclingArguments, runs: Runs) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """The learning rate of each arm, and the losses of the choice; all arms that compose share one."""
    chosen = {
        name: runs.choose_rate(arguments.tuning_seed, name, arguments.learning_rates) for name in ("plain", "composed")
    }
    rates = {name: chosen["composed" if arm.composed else "plain"][0] for name, arm in ARMS.items()}
    return rates, {name: losses for name, (_, losses) in chosen.items()}


def claim(output: Path, settings: dict[str, Any]) -> None:
    """Marks the folder as the study's with these settings; more seeds and learning rates may join it later.

    Raises:
        UserError: it is another one's.
    """
    marker = output / SETTINGS
    if marker.exists():
        stored = json.loads(marker.read_text(encoding="utf-8"))
        if changed := [name for name in settings if stored.get(name) != settings[name]]:
            raise UserError(f"{output} holds a study with other {', '.join(changed)}; give another --output")
    elif output.exists() and any(output.iterdir()):
        raise UserError(f"{output} holds something that is no upcycling study; give a new or empty --output")
    output.mkdir(parents=True, exist_ok=True)
    write_json(marker, settings, indent=1)


def draw(output: Path) -> str:
    """Makes the table and the plot from the record alone; returns the table.

    Raises:
        UserError: there is no record.
    """
    try:
        record = json.loads((output / RECORD).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{output} holds no {RECORD}; run the study without --redraw first") from error
    text = table(record)
    write_whole(output / TABLE, text + "\n")
    draw_arms(record, output / PLOT)
    return text
