"""Reading a checkpoint's tensors one by one, from safetensors or `.bin`, in one file or several."""

import pickle
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.errors import REFUSED_PICKLE, UserError, first_line
from ...common.weight_files import check_places, find_weight_files, open_safetensors, read_header

STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Header(NamedTuple):
    """What is known about a tensor without reading it; `dtype` is None for formats that we do not convert."""

    path: Path
    shape: torch.Size
    dtype: torch.dtype | None


class TensorSource:
    """The weights in a folder; only headers and the last `.bin` file (mapped if its format allows) stay in memory.

    Raises:
        UserError: there are no weights, a file is missing or damaged, or a pickle would run code.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._loaded: tuple[Path, dict[str, Tensor]] | None = None
        self.files, placed = find_weight_files(folder)
        found = {path: self._read_headers(path) for path in self.files}
        check_places(found, placed)
        self.headers = {key: header for headers in found.values() for key, header in headers.items()}

    def read(self, key: str) -> Tensor:
        """Returns one tensor, `[...]` as in `shapes`, in its own dtype.

        Raises:
            UserError: its file cannot be read any more.
        """
        path = self.headers[key].path
        if path.suffix != ".safetensors":
            return self._load(path)[key]
        with open_safetensors(path) as file:
            return file.get_tensor(key)

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Every tensor's shape."""
        return {key: header.shape for key, header in self.headers.items()}

    @property
    def elements(self) -> int:
        """The number of elements of all tensors."""
        return count_elements(self.shapes.values())

    def _read_headers(self, path: Path) -> dict[str, Header]:
        if path.suffix != ".safetensors":
            return {key: Header(path, tensor.shape, tensor.dtype) for key, tensor in self._load(path).items()}
        stored = read_header(path)
        return {key: Header(path, torch.Size(one.shape), STORED_DTYPES.get(one.dtype)) for key, one in stored.items()}

    def _load(self, path: Path) -> dict[str, Tensor]:
        """The tensors `[...]` of a `.bin` file by name; the last file stays loaded."""
        if self._loaded is None or self._loaded[0] != path:
            self._loaded = None  # the old file's memory goes before the new one's comes
            self._loaded = (path, load_pickle(path))
        return self._loaded[1]


def count_elements(shapes: Iterable[torch.Size]) -> int:
    """The number of elements in tensors of these shapes."""
    return sum(shape.numel() for shape in shapes)


def common_dtype(headers: Mapping[str, Header]) -> torch.dtype:
    """The narrowest format that holds all of these tensors exactly.

    Raises:
        UserError: a tensor is quantized, or no floating point number at all.
    """
    dtype: torch.dtype | None = None
    for key, header in headers.items():
        if header.dtype is None or header.dtype not in STORED_DTYPES.values():
            what = header.dtype or "quantized, or not floating point"
            raise UserError(
                f"{key} in {header.path.name} is {what}; only {', '.join(STORED_DTYPES)} weights can be converted"
            )
        dtype = header.dtype if dtype is None else torch.promote_types(dtype, header.dtype)
    return dtype or torch.float32


def load_pickle(path: Path) -> dict[str, Tensor]:
    """Returns the tensors `[...]` of a `torch.save` file by name, without running any code in it.

    Raises:
        UserError: the file is damaged, needs code, or holds something else than tensors by name.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # of unusual pickles, which are either read or refused
            content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise UserError(f"{path} is {REFUSED_PICKLE}; get the weights as safetensors") from error
    except Exception as error:  # a damaged file may end in any exception of the pickle format's many instructions
        raise UserError(f"{path} is truncated or no weight file: {first_line(error)}; copy or save it again") from error
    if not isinstance(content, dict) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()
    ):
        raise UserError(f"{path} holds something else than tensors by name; save the model's state_dict() in it")
    for key, tensor in content.items():
        _require_stored(path, key, tensor)
    return {key: tensor.detach() for key, tensor in content.items()}


def _require_stored(path: Path, key: str, tensor: Tensor) -> None:
    """Raises UserError where the file lacks elements of `tensor` `[...]`: it is expanded, sparse or on no device."""
    is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not is_plain or tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
        raise UserError(
            f"{key} in {path} has shape {tuple(tensor.shape)}, but the file does not store all of its elements; "
            "save it again as a contiguous tensor"
        )
