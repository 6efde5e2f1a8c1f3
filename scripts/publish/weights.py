"""The safetensors files of a checkpoint: which they are, and whether they are whole."""

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..common.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Weights:
    """The files that hold the weights, with the index if there are several, and how many elements they hold."""

    files: list[str]
    elements: Counter[str] = field(default_factory=Counter)  # by dtype as safetensors spells it, such as "BF16"

    @property
    def total(self) -> int:
        """Elements of all dtypes."""
        return self.elements.total()


def read_weights(folder: Path) -> Weights:
    """Finds the weights in `folder` as Transformers does and reads all headers, but no weights.

    Raises:
        UserError: there are none, a shard is missing or damaged, or the index names what a shard lacks.
    """
    shards = _find_shards(folder)
    elements: Counter[str] = Counter()
    for name, expected in shards.items():
        counted, keys = _read_header(folder / name)
        if absent := sorted(expected - keys):
            raise UserError(f"{folder / INDEX} places {absent[0]} in {name}, which lacks it; save the checkpoint again")
        elements += counted
    return Weights([*shards, *([] if SINGLE in shards else [INDEX])], elements)


def _find_shards(folder: Path) -> dict[str, set[str]]:
    """The weight files with the tensors that each must have."""
    if (folder / SINGLE).is_file():
        return {SINGLE: set()}
    if not (folder / INDEX).is_file():
        others = sorted(path.name for pattern in ("*.bin", "*.safetensors") for path in folder.glob(pattern))
        found = f" (there is {others[0]})" if others else ""
        raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}{found}; write them with `save_pretrained`")
    shards: dict[str, set[str]] = {}
    for key, name in _read_weight_map(folder / INDEX).items():
        shards.setdefault(name, set()).add(key)
    for name in sorted(shards):
        if Path(name).name != name or not (folder / name).is_file():
            raise UserError(f"{folder / INDEX} names the shard {name}, which is not in that folder; copy it there")
    return dict(sorted(shards.items()))


def _read_weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not (weight_map and all(isinstance(name, str) for name in weight_map.values())):
            raise ValueError("weight_map is empty or holds something else than file names")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not an index of shards ({error}); save the checkpoint again") from error
    return weight_map


def _read_header(path: Path) -> tuple[Counter[str], set[str]]:
    elements: Counter[str] = Counter()
    try:
        with safe_open(path, framework="pt") as file:
            keys = set(file.keys())
            for key in keys:
                tensor = file.get_slice(key)
                elements[tensor.get_dtype()] += math.prod(tensor.get_shape())
    except (SafetensorError, OSError) as error:
        size = f"{path.stat().st_size:,} bytes"
        raise UserError(
            f"{path} ({size}) is truncated or no safetensors file: {error}; copy or save it again"
        ) from error
    return elements, keys
