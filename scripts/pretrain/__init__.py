"""Pretraining as a library: `pretrain(PretrainArguments(output="runs/tiny"))` does what `dynattn pretrain` does."""

from .arguments import PretrainArguments
from .job import pretrain
from .results import Result

__all__ = ["PretrainArguments", "Result", "pretrain"]
