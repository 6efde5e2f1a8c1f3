"""Pretraining as a library: `pretrain(PretrainArguments(output="runs/tiny"))` does what `dynattn pretrain` does."""

from importlib import import_module
from typing import Any

from .arguments import PretrainArguments

__all__ = ["PretrainArguments", "Result", "pretrain"]

# Names that need torch and Transformers, and their modules. They are imported at first use, so that
# `dynattn pretrain --help` answers at once.
LAZY = {"Result": "results", "pretrain": "job"}


def __getattr__(name: str) -> Any:
    """Imports a name of `LAZY` (PEP 562)."""
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{LAZY[name]}", __name__), name)
