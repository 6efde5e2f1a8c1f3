"""A DCFormer block with each position scheme, composed and plain; ratios refer to plain attention with rotary angles.

Every candidate runs the implementation that its configuration takes by default.
"""

from functools import partial
from typing import Any

import torch

from dynattn.configuration.composed_config import POSITION_SCHEMES
from dynattn.configuration.mixers import NO_COMPOSITION

from ..harness.interface import Candidate, Subject
from .models import QUICK_SHAPES, ModelProblem, block_cases

# The fields of a configuration for each scheme; `gain` is URPE's, beside rotary angles.
SCHEMES: dict[str, dict[str, Any]] = {name: {"position_scheme": name} for name in POSITION_SCHEMES}
SCHEMES["gain"] = {"position_gain": "distance"}
PREFIX = "plain-"
BASELINE = f"{PREFIX}rope"
FUNCTIONS = SCHEMES | {f"{PREFIX}{name}": fields | NO_COMPOSITION for name, fields in SCHEMES.items()}


def candidates(device: torch.device) -> list[Candidate]:
    """All schemes; each is a function of its own, named as in tables."""
    found = []
    for name in FUNCTIONS:
        prepare = partial(ModelProblem.call, function=name, implementation=None)
        found.append(Candidate(name, "plain" if name == BASELINE else "ours", name, prepare))
    return found


POSITIONS = Subject(
    name="positions",
    function="rope",
    shapes=("16x64@512", "16x64@2048"),
    quick_shapes=QUICK_SHAPES,
    candidates=candidates,
    cases=partial(block_cases, functions=FUNCTIONS),
)
