"""Finds the safetensors files of a checkpoint, and checks that they are complete."""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..common.checkpoint_files import WEIGHTS, WEIGHTS_INDEX, read_weight_map, require_inside
from ..common.errors import UserError
from ..common.safetensors_files import read_header


@dataclass(frozen=True)
class Weights:
    """The files with the weights, with the index if there are several, and the contents of their headers."""

    files: list[str]
    dtypes: dict[str, str] = field(default_factory=dict)  # as safetensors spells them, such as "BF16", by tensor
    shapes: dict[str, Sequence[int]] = field(default_factory=dict)  # by tensor

    @property
    def elements(self) -> Counter[str]:
        """Elements by dtype."""
        counter: Counter[str] = Counter()
        for name, shape in self.shapes.items():
            counter[self.dtypes[name]] += math.prod(shape)
        return counter

    @property
    def total(self) -> int:
        """Elements of all dtypes."""
        return self.elements.total()

    def without(self, names: Collection[str]) -> "Weights":
        """The same files, with the tensors of these names left out of the contents."""
        shapes = {name: shape for name, shape in self.shapes.items() if name not in names}
        return Weights(self.files, {name: self.dtypes[name] for name in shapes}, shapes)


def read_weights(folder: Path) -> Weights:
    """Finds the weights in `folder` as Transformers does and reads all headers, but no weights.

    Raises:
        UserError: there are no weights, a shard is missing, damaged or a link to elsewhere, a shard lacks a tensor that
            the index places in it, or two shards have the same tensor.
    """
    index, shards = folder / WEIGHTS_INDEX, _find_shards(folder)
    weights = Weights([*shards, *([] if (folder / WEIGHTS).is_file() else [WEIGHTS_INDEX])])
    for name, expected in shards.items():
        found = read_header(folder / name)
        if absent := sorted(expected - found.keys()):
            raise UserError(f"{index} places {absent[0]} in {name}, which lacks it; save the checkpoint again")
        if twice := sorted(found.keys() & weights.shapes.keys()):
            raise UserError(f"{twice[0]} is in {name} and in another shard of {folder}; save the checkpoint again")
        weights.dtypes.update({key: tensor.dtype for key, tensor in found.items()})
        weights.shapes.update({key: tensor.shape for key, tensor in found.items()})
    return weights


def _find_shards(folder: Path) -> dict[str, set[str]]:
    """The weight files, and the names of the tensors that each must have according to the index."""
    index = folder / WEIGHTS_INDEX
    if (folder / WEIGHTS).is_file():
        return {require_inside(folder / WEIGHTS).name: set()}
    if not index.is_file():
        others = sorted(path.name for pattern in ("*.bin", "*.safetensors") for path in folder.glob(pattern))
        found = f" (there is {others[0]})" if others else ""
        raise UserError(f"{folder} has neither {WEIGHTS} nor {WEIGHTS_INDEX}{found}; write them with `save_pretrained`")
    shards: dict[str, set[str]] = {}
    for key, path in read_weight_map(index).items():
        shards.setdefault(path.name, set()).add(key)
    for name in sorted(shards):
        if not (folder / name).is_file():
            raise UserError(f"{index} names the shard {name}, which is not in that folder; copy it there")
    return dict(sorted(shards.items()))
