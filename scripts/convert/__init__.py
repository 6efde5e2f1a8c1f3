"""Conversion as a library: `convert_official(OfficialArguments(source=..., destination=...))`,
`convert_rcmha(RCMHAArguments(source=..., destination=...))`,
`upcycle_checkpoint(UpcycleArguments(source=..., destination=...), NEOX)`, and likewise with `LLAMA`.
"""

from .check import CheckArguments, compare_checkpoints
from .official.arguments import OfficialArguments
from .official.job import Conversion, convert_official
from .rcmha.arguments import RCMHAArguments
from .rcmha.job import RCMHAConversion, convert_rcmha
from .upcycle.arguments import UpcycleArguments
from .upcycle.job import upcycle_checkpoint
from .upcycle.parents.llama import LLAMA
from .upcycle.parents.neox import NEOX
from .upcycle.plan import Upcycling

__all__ = [
    "LLAMA",
    "NEOX",
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
