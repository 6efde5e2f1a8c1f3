"""The arguments of `dynattn convert official`."""

from dataclasses import dataclass
from typing import Literal

from ...common.arguments import option
from ...common.errors import UserError
from ..common.arguments import ConversionArguments

# Our configurations take no larger sizes.
LARGEST_WINDOW = 2**31 - 1


@dataclass
class OfficialArguments(ConversionArguments):
    """Arguments of one conversion.

    Raises:
        UserError: a size or a window is out of range, or an option has no meaning for the direction.
    """

    family: Literal["auto", "dcformer", "dcpythia"] = option(
        "auto", "what the official model is; auto: its config.json and its weights tell"
    )
    window: int | None = option(
        None, "keys that a token of a local layer sees, itself included, whatever config.json says"
    )
    official_prefill_window: bool = option(
        False, "one key more in local layers, as the official whole-prompt inference sees (not its trainer)"
    )
    prefer_merged: bool = option(
        False, "take the composition from dw_m and qkw_m, which the official fine-tuning trains"
    )
    static: Literal["refuse", "keep", "drop"] = option(
        "refuse", "what to do with static matrices (pre_proj.w, post_proj.w, sw) that are no identity"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        least = 1 if self.official_prefill_window else 2  # which adds a key
        if self.window is not None and not least <= self.window <= LARGEST_WINDOW:
            raise UserError(
                f"window must be from {least}, a token and one before it, to {LARGEST_WINDOW}, not {self.window}"
            )
        given = self.given(("window", "official_prefill_window", "prefer_merged", "family", "static"))
        if self.reverse and given:
            raise UserError(f"{given} only matter for reading the official format; leave out --reverse or them")
