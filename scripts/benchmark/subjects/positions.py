"""A DCFormer block with each position scheme, composed and plain; ratios refer to plain attention with rotary angles.

Every candidate runs the implementation that its configuration takes by default.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dynattn.configuration.composed_config import POSITION_SCHEMES
from dynattn.configuration.mixers import NO_COMPOSITION

from ..harness.accuracy import Results
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
    return [
        Candidate(name, "plain" if name == BASELINE else "ours", name, partial(prepare, function=name))
        for name in FUNCTIONS
    ]


def prepare(problem: ModelProblem, function: str) -> Callable[[], Results]:
    """The call of a scheme's block."""
    return problem.step(problem.model(function, None), problem.tokens)


cases = partial(block_cases, functions=FUNCTIONS)
POSITIONS = Subject("positions", "rope", ("16x64@512", "16x64@2048"), QUICK_SHAPES, candidates, cases)
