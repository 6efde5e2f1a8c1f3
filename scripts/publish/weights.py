"""What the safetensors files of a checkpoint hold."""

import dataclasses
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ..common.checkpoint_files import WEIGHTS, WEIGHTS_INDEX
from ..common.errors import UserError
from ..common.safetensors_files import StoredTensor, read_header
from ..common.weight_files import check_places, find_weight_files


@dataclass(frozen=True)
class Weights:
    """The files with the weights, with the index if there are several, and what their headers say of each tensor."""

    files: list[str]
    tensors: dict[str, StoredTensor]

    @property
    def elements(self) -> Counter[str]:
        """Elements by dtype."""
        counter: Counter[str] = Counter()
        for tensor in self.tensors.values():
            counter[tensor.dtype] += math.prod(tensor.shape)
        return counter

    @property
    def total(self) -> int:
        """Elements of all dtypes."""
        return self.elements.total()

    def without(self, names: Collection[str]) -> "Weights":
        """The same files, with the tensors of these names left out of the contents."""
        kept = {name: tensor for name, tensor in self.tensors.items() if name not in names}
        return dataclasses.replace(self, tensors=kept)


def read_weights(folder: Path) -> Weights:
    """Finds the weights in `folder` as Transformers does and reads all headers, but no weights.

    Raises:
        UserError: there are no weights, or a file is missing, damaged, a link to elsewhere or not what its index says.
    """
    if not (folder / WEIGHTS).is_file() and not (folder / WEIGHTS_INDEX).is_file():
        others = sorted(path.name for pattern in ("*.bin", "*.safetensors") for path in folder.glob(pattern))
        found = f" (there is {others[0]})" if others else ""
        raise UserError(f"{folder} has neither {WEIGHTS} nor {WEIGHTS_INDEX}{found}; write them with `save_pretrained`")
    files, placed = find_weight_files(folder)
    headers = {path: read_header(path) for path in files}
    check_places(headers, placed)
    tensors = {name: tensor for header in headers.values() for name, tensor in header.items()}
    return Weights([*(path.name for path in files), *([WEIGHTS_INDEX] if placed else [])], tensors)
