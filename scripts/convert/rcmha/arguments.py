"""The arguments of `dynattn convert rcmha`."""

from dataclasses import dataclass
from typing import Literal

from ...common.arguments import option
from ...common.errors import UserError
from ..common.arguments import ConversionArguments

# Half the rows of the position tables of unchanged official code.
POSITIONS = 4096
# Tables with more rows take gigabytes for the smallest models, and no model has them.
MOST_POSITIONS = 1 << 20
FORWARD_ONLY = ("max_position_embeddings", "memory_type")
REVERSE_ONLY = ("official_positions", "from_streaming")


@dataclass
class RCMHAArguments(ConversionArguments):
    """Arguments of one conversion.

    Raises:
        UserError: a size is out of range, or an option has no meaning for the direction.
    """

    max_position_embeddings: int | None = option(
        None,
        "rows of the position tables to keep, more than mem_len: longest memory and segment together; "
        "default: all that the official code can reach",
    )
    memory_type: Literal["segment", "streaming"] = option(
        "segment",
        "segment: the official function; streaming: a window over mem_len tokens, another function with "
        "the same weights, whose tables are mem_len + 1 rows long",
    )
    official_positions: int = option(
        POSITIONS, "with --reverse: half the rows of the official tables, P; unchanged official code has 4096"
    )
    from_streaming: bool = option(
        False, "with --reverse: says that a streaming model may become one with segments, which differs"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.official_positions <= MOST_POSITIONS:
            raise UserError(f"official_positions must be from 1 to {MOST_POSITIONS}, not {self.official_positions}")
        if self.reverse and (given := self.given(FORWARD_ONLY)):
            raise UserError(f"{given} only matter for reading the official format; leave out --reverse or them")
        if not self.reverse and (given := self.given(REVERSE_ONLY)):
            raise UserError(f"{given} only matter for writing the official format; add --reverse or leave them out")
