"""The GPUs that a dry run knows, with numbers from the vendor's data sheets."""

import re
from dataclasses import dataclass

from ...common.errors import UserError


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        name: name for the terminal.
        bfloat16_rate: peak FLOP/s of dense matrix products in bfloat16.
        float32_rate: the same in float32, for which PyTorch does not use tensor cores unless it is told to.
        gib: memory.
        node: how many of them a machine usually has.
    """

    name: str
    bfloat16_rate: float
    float32_rate: float
    gib: int
    node: int = 8


# NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200 SXM and L40S; rates without sparsity.
GPUS = {
    "a100": Gpu("A100 80GB", 312e12, 19.5e12, 80),
    "h100": Gpu("H100 SXM", 989e12, 67e12, 80),
    "h200": Gpu("H200 SXM", 989e12, 67e12, 141),
    "l40s": Gpu("L40S", 362e12, 91.6e12, 48),
}


def parse_cluster(text: str) -> tuple[Gpu, int]:
    """The GPU and the number of GPUs that `NAME:COUNT` names.

    Raises:
        UserError: the name is not known, or the number is not positive.
    """
    match = re.fullmatch(r"(\w+):([1-9]\d{0,5})", text.lower())
    if match is None or match[1] not in GPUS:
        raise UserError(f"on={text} must be NAME:COUNT like h100:64, with a name of {', '.join(GPUS)}")
    return GPUS[match[1]], int(match[2])
