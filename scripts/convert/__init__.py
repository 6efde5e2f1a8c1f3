"""Conversion as a library: `convert_official(OfficialArguments(source=..., destination=...))`,
`convert_rcmha(RCMHAArguments(source=..., destination=...))`,
`upcycle_checkpoint(UpcycleArguments(source=..., destination=...), NEOX)`, and likewise with `BART_MARIAN`, `LLAMA`,
`MODERNBERT` and `VIT`.

A name is imported when it is first used, so that `dynattn convert --help` waits for neither torch nor Transformers.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "BART_MARIAN": "upcycle.parents.bart",
    "LLAMA": "upcycle.parents.llama",
    "MODERNBERT": "upcycle.parents.modernbert",
    "NEOX": "upcycle.parents.neox",
    "VIT": "upcycle.parents.vit",
    "CheckArguments": "check",
    "Conversion": "official.plan",
    "OfficialArguments": "official.arguments",
    "RCMHAArguments": "rcmha.arguments",
    "RCMHAConversion": "rcmha.plan",
    "UpcycleArguments": "upcycle.arguments",
    "Upcycling": "upcycle.plan",
    "compare_checkpoints": "check",
    "convert_official": "official.main",
    "convert_rcmha": "rcmha.main",
    "upcycle_checkpoint": "upcycle.main",
}

__all__ = [
    "BART_MARIAN",
    "LLAMA",
    "MODERNBERT",
    "NEOX",
    "VIT",
    "CheckArguments",
    "Conversion",
    "OfficialArguments",
    "RCMHAArguments",
    "RCMHAConversion",
    "UpcycleArguments",
    "Upcycling",
    "compare_checkpoints",
    "convert_official",
    "convert_rcmha",
    "upcycle_checkpoint",
]


def __getattr__(name: str) -> Any:
    """Imports a public name from its module at its first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
