"""Conversion as a library: `convert_official(OfficialArguments(source=..., destination=...))`,
`convert_rcmha(RCMHAArguments(source=..., destination=...))`,
`upcycle_checkpoint(UpcycleArguments(source=..., destination=...), NEOX)`, and likewise with `BART_MARIAN`, `GPT2`,
`LLAMA`, `MODERNBERT`, `OLMO` and `VIT`.

A name is imported when it is first used, so that `dynattn convert --help` waits for neither torch nor Transformers.
"""

from ..common.lazy_names import lazy_names

_MODULES = {
    "BART_MARIAN": "upcycle.parents.bart",
    "GPT2": "upcycle.parents.gpt2",
    "LLAMA": "upcycle.parents.llama",
    "MODERNBERT": "upcycle.parents.modernbert",
    "NEOX": "upcycle.parents.neox",
    "OLMO": "upcycle.parents.olmo",
    "VIT": "upcycle.parents.vit",
    "CheckArguments": "check",
    "Conversion": "official.plan",
    "OfficialArguments": "official.arguments",
    "RCMHAArguments": "rcmha.arguments",
    "RCMHAConversion": "rcmha.plan",
    "UpcycleArguments": "upcycle.arguments",
    "Upcycling": "upcycle.plan",
    "compare_checkpoints": "check",
    "convert_official": "official.plan",
    "convert_rcmha": "rcmha.plan",
    "upcycle_checkpoint": "upcycle.plan",
}

__all__ = [*_MODULES]

__getattr__ = lazy_names(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
