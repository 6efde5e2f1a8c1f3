"""Everything that `dynattn convert pythia` and `dynattn convert llama` can be told."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from dynattn.configuration.configuration_composition import LAYER_TYPES

from ..errors import UserError
from .arguments import parse_size

FORWARD_ONLY = ("init", "rank", "only", "static", "layer_types", "sliding_window", "qk_norm", "train_from_here", "seed")


@dataclass
class UpcycleArguments:
    """Arguments of one conversion; a YAML file holds the same names.

    Raises:
        UserError: a value makes no sense, or an option has no meaning for the direction.
    """

    source: str = field(metadata={"help": "folder, or name on the Hub, to read (SRC, the first argument)"})
    destination: str = field(metadata={"help": "folder to write (DST, the second argument)"})
    revision: str | None = field(default=None, metadata={"help": "branch, tag or commit on the Hub, such as step3000"})
    reverse: bool = field(default=False, metadata={"help": "from our model, if it composes nothing, to the parent's"})
    init: Literal["identity", "paper"] = field(
        default="identity",
        metadata={"help": "start of the composition; identity: logits stay as they are, paper: small random numbers"},
    )
    rank: int = field(default=2, metadata={"help": "rank of the dynamic mixing of heads"})
    only: Literal["both", "pre", "post"] = field(
        default="both", metadata={"help": "compose before the softmax, after it, or at both places"}
    )
    static: bool = field(default=False, metadata={"help": "add a learned mixing that does not depend on the input"})
    layer_types: str | None = field(
        default=None, metadata={"help": "letters to repeat over the layers: L sees a window, G everything, such as LG"}
    )
    sliding_window: int | None = field(
        default=None, metadata={"help": "keys that a token of an L layer sees, itself included"}
    )
    qk_norm: bool = field(default=False, metadata={"help": "add a query-key norm; the model must then be trained"})
    train_from_here: bool = field(
        default=False, metadata={"help": "says that the result may differ from the parent, because it will be trained"}
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="auto", metadata={"help": "number format to write; auto: the one that is read"}
    )
    seed: int = field(default=0, metadata={"help": "of the random numbers that the composition starts from"})
    max_shard_size: str | None = field(
        default=None, metadata={"help": "largest weight file, such as 5GB or 500MB; the source's, or 5GB if it has one"}
    )
    verify: bool = field(
        default=True, metadata={"help": "run both models and compare logits; needs the model in float32"}
    )
    overwrite: bool = field(default=False, metadata={"help": "replace DST if it holds a checkpoint"})

    def __post_init__(self) -> None:
        if self.max_shard_size is not None:
            parse_size(self.max_shard_size)
        defaults: dict[str, Any] = {entry.name: entry.default for entry in fields(self)}
        given = [name for name in FORWARD_ONLY if getattr(self, name) != defaults[name]]
        if self.reverse and given:
            raise UserError(f"{', '.join(given)} only matter for making our model; leave out --reverse or them")
        if self.rank < 1:
            raise UserError(f"rank must be at least 1, not {self.rank}")
        if self.seed < 0:
            raise UserError(f"seed must not be negative, but is {self.seed}")
        if self.qk_norm and not self.train_from_here:
            raise UserError(
                "--qk-norm makes another model of the parent, useless until it is trained; add --train-from-here if "
                "that is what you want"
            )
        self._check_windows()

    def _check_windows(self) -> None:
        if self.sliding_window is not None and self.sliding_window < 1:
            raise UserError(f"sliding_window must be at least 1 (the token itself), not {self.sliding_window}")
        if self.layer_types is not None and (not self.layer_types or set(self.layer_types) - LAYER_TYPES.keys()):
            raise UserError(f"layer_types {self.layer_types!r} must be letters L (a window) and G (everything), as LG")
