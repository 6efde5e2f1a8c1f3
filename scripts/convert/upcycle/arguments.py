"""Arguments of the conversions from plain models: `dynattn convert bart`, `gpt2`, `llama` and the others."""

from dataclasses import dataclass, field
from typing import Literal

from ...common.arguments import option
from ...common.errors import UserError
from ...common.number_ranges import check_positive, check_seed
from ..common.arguments import ConversionArguments

FORWARD_ONLY = (
    "init",
    "rank",
    "groups",
    "only",
    "static",
    "layer_types",
    "sliding_window",
    "qk_norm",
    "train_from_here",
    "seed",
)


@dataclass
class UpcycleArguments(ConversionArguments):
    """Arguments of one conversion.

    Raises:
        UserError: a value is out of range, or an option has no meaning for the direction.
    """

    source: str = field(metadata={"help": "folder, or name on the Hub, to read (SRC, the first argument)"})
    reverse: bool = option(False, "from our model, if it composes nothing, to the parent's")
    verify: bool = option(True, "run both models and compare logits; needs the model in float32")
    revision: str | None = option(None, "branch, tag or commit on the Hub, such as step3000")
    init: Literal["identity", "paper"] = option(
        "identity", "start of the composition; identity: logits stay as they are, paper: small random numbers"
    )
    rank: int = option(2, "rank of the dynamic mixing of heads")
    groups: int = option(
        1, "groups of consecutive heads; only heads of a group mix, so that tensor parallelism can split attention"
    )
    only: Literal["both", "pre", "post"] = option("both", "compose before the softmax, after it, or at both places")
    static: bool = option(False, "add a learned mixing that does not depend on the input")
    layer_types: str | None = option(
        None, "letters that repeat over the layers: L sees a window, G everything, such as LG"
    )
    sliding_window: int | None = option(
        None, "keys that a token of an L layer sees, itself included; by default the parent's number"
    )
    qk_norm: bool = option(False, "add a query-key norm; the model must then be trained")
    train_from_here: bool = option(False, "says that the result may differ from the parent, because it will be trained")
    seed: int = option(0, "seed of the random numbers that the composition starts from")

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.given(FORWARD_ONLY)
        if self.reverse and given:
            raise UserError(f"{given} only matter for making our model; leave out --reverse or them")
        check_positive(self, ["rank", "groups"])
        check_seed("seed", self.seed)
        if self.qk_norm and not self.train_from_here:
            raise UserError(
                "--qk-norm makes another model of the parent, useless until it is trained; add --train-from-here if "
                "that is what you want"
            )
        self._check_windows()

    def _check_windows(self) -> None:
        if self.sliding_window is not None and self.sliding_window < 2:
            raise UserError(f"sliding_window must be at least 2 (a token and one before it), not {self.sliding_window}")
        if self.layer_types is None:
            return

        from dynattn.configuration.composed_config import LAYER_TYPES  # here, because it imports Transformers

        if not self.layer_types or set(self.layer_types) - LAYER_TYPES.keys():
            raise UserError(f"layer_types {self.layer_types!r} must be letters L (a window) and G (everything), as LG")
