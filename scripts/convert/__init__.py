"""Conversion as a library: `convert_official(OfficialArguments(source=..., destination=...))`,
`convert_rcmha(RCMHAArguments(source=..., destination=...))`,
`upcycle_checkpoint(UpcycleArguments(source=..., destination=...), NEOX)`, and likewise with `LLAMA`.
"""

from .arguments import OfficialArguments
from .check import CheckArguments, compare_checkpoints
from .job import Conversion, convert_official
from .llama_layout import LLAMA
from .neox_layout import NEOX
from .rcmha_arguments import RCMHAArguments
from .rcmha_job import RCMHAConversion, convert_rcmha
from .upcycle import upcycle_checkpoint
from .upcycle_arguments import UpcycleArguments
from .upcycle_plan import Upcycling

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
