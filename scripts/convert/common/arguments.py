"""The arguments that every conversion has, and how sizes are read from the command line."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal

from ...common.arguments import given_options, option
from ...common.errors import UserError

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass
class ConversionArguments:
    """Arguments of any conversion; a YAML file holds the same names.

    Raises:
        UserError: `max_shard_size` is no size.
    """

    source: str = field(metadata={"help": "folder to read (SRC, the first argument); it is left as it is"})
    destination: str = field(metadata={"help": "folder to write (DST, the second argument)"})
    reverse: bool = option(False, "from our format to the official one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "number format to write; auto: the one that is read"
    )
    max_shard_size: str | None = option(
        None, "largest weight file, such as 5GB or 500MB; the source's, or 5GB if it has one"
    )
    verify: bool = option(True, "compare logits with the formulas on the official tensors; needs the model in float32")
    overwrite: bool = option(False, "replace DST if it holds a checkpoint")

    def __post_init__(self) -> None:
        if self.max_shard_size is not None:
            parse_size(self.max_shard_size)

    def given(self, names: Sequence[str]) -> str:
        """The options among `names` that differ from their defaults, as text."""
        given = given_options(self)
        return ", ".join(name for name in names if name in given)


def parse_size(text: str) -> int:
    """Returns the bytes of a size such as "5GB".

    Raises:
        UserError: it is no size, or nothing fits in it.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", text.strip().upper())
    unit = match and UNITS.get(match[2] or "B")
    if not (match and unit):
        raise UserError(f"max_shard_size {text!r} is no size; write it as 5GB, 500MB or 200MiB")
    size = int(Decimal(match[1]) * unit)
    if size < 1:
        raise UserError(f"max_shard_size {text!r} holds nothing; give at least 1KB")
    return size
