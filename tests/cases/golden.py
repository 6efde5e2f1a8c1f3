"""The golden cases, see `golden/README.md`."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "golden"


def case_names(*patterns: str) -> list[str]:
    """The folders that match one of `patterns`, sorted."""
    return sorted(path.name for pattern in patterns for path in GOLDEN.glob(pattern))


def read_meta(name: str) -> dict[str, Any]:
    """How a case was made."""
    return json.loads((GOLDEN / name / "meta.json").read_text())


def read_case(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """How a case was made, and its tensors."""
    return read_meta(name), load_file(GOLDEN / name / "tensors.safetensors")


def tensors_under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose name begins with `prefix`, without it: `sd.` are weights, `grad.` gradients."""
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
