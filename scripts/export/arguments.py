"""The options of `dynattn export`."""

from dataclasses import dataclass, field
from typing import Literal

from ..common.arguments import option
from ..common.errors import UserError
from ..common.number_ranges import check_seed


@dataclass
class ExportArguments:
    """Arguments of one export; a YAML file holds the same names.

    Raises:
        UserError: no tokens would be generated for the proof.
    """

    format: Literal["torch", "onnx", "openvino", "executorch"] = field(
        metadata={"help": "what to write (the first word): .pt2, .onnx, OpenVINO's .xml and .bin, or .pte"}
    )
    source: str = field(metadata={"help": "folder of the checkpoint (MODEL, the second word); it is left as it is"})
    destination: str = field(metadata={"help": "folder to write (DST, the third word)"})
    tokens: int = option(64, "tokens that the runtime generates for the proof, after each of two prompts")
    seed: int = option(0, "seed of the random prompts of the proof")
    overwrite: bool = option(False, "replace DST if it holds a model")

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise UserError(f"--tokens {self.tokens} would compare nothing; give 1 or more")
        check_seed("seed", self.seed)
