"""Conversion as a library: `convert_official(OfficialArguments(source=..., destination=...))`,
`upcycle_checkpoint(UpcycleArguments(source=..., destination=...), NEOX)`, and likewise with `LLAMA`.
"""

from .arguments import OfficialArguments
from .check import CheckArguments, compare_checkpoints
from .job import Conversion, convert_official
from .llama_layout import LLAMA
from .neox_layout import NEOX
from .upcycle import upcycle_checkpoint
from .upcycle_arguments import UpcycleArguments
from .upcycle_plan import Upcycling

__all__ = [
    "LLAMA",
    "NEOX",
    "CheckArguments",
    "Conversion",
    "OfficialArguments",
    "UpcycleArguments",
    "Upcycling",
    "compare_checkpoints",
    "convert_official",
    "upcycle_checkpoint",
]
