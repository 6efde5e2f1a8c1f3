"""Pretraining as a library: `pretrain(PretrainArguments(output="runs/tiny"))` does what `dynattn pretrain` does."""

from ..common.lazy_names import lazy_names
from .arguments import PretrainArguments

__all__ = ["PretrainArguments", "Result", "pretrain"]

# These need torch and Transformers, for which `dynattn pretrain --help` does not wait.
__getattr__ = lazy_names(__name__, {"Result": "results", "pretrain": "job"})
