"""GPUs that a run can be planned for, as their vendor's data sheets describe them."""

import re
from dataclasses import dataclass

from ...common.errors import UserError


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        name: for the terminal.
        flops_per_second: of dense matrix products in bfloat16.
        gib: memory.
        node: how many usually share a machine.
    """

    name: str
    flops_per_second: float
    gib: int
    node: int = 8


# NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200 SXM and L40S; rates without sparsity.
GPUS = {
    "a100": Gpu("A100 80GB", 312e12, 80),
    "h100": Gpu("H100 SXM", 989e12, 80),
    "h200": Gpu("H200 SXM", 989e12, 141),
    "l40s": Gpu("L40S", 362e12, 48),
}


def parse_cluster(text: str) -> tuple[Gpu, int]:
    """The GPU and how many of them `NAME:COUNT` means.

    Raises:
        UserError: a name that is not known, or a number that is not positive.
    """
    match = re.fullmatch(r"(\w+):([1-9]\d{0,5})", text.lower())
    if match is None or match[1] not in GPUS:
        raise UserError(f"on={text} must be NAME:COUNT like h100:64, with a name of {', '.join(GPUS)}")
    return GPUS[match[1]], int(match[2])
