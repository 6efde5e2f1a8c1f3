"""The arguments of the study. Nothing here imports PyTorch, so that `--help` and mistakes are answered at once."""

from dataclasses import dataclass, field

from ..paired_study.arguments import PairedStudyArguments


@dataclass
class VisionArguments(PairedStudyArguments):
    """Arguments of the study; see the base for the others."""

    output: str = field(default="runs/vision", metadata={"help": "folder of the study"})
    learning_rates: list[float] = field(
        default_factory=lambda: [1e-3, 3e-3, 9e-3],
        metadata={"help": "peaks from which each arm gets its best for each task"},
    )
