"""Reading a checkpoint's tensors one by one, from safetensors or `.bin`, in one file or several."""

import pickle
import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.checkpoint_files import read_weight_map, require_inside
from ...common.errors import REFUSED_PICKLE, UserError, first_line
from ...common.safetensors_files import open_safetensors, read_header

STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# How the names of weight files begin and end, the preferred ones first.
FORMATS = (("model", ".safetensors"), ("pytorch_model", ".bin"))
NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state")
# Suffixes under which others store what is read here as `.bin`.
OTHER_PICKLES = (".pth", ".pt", ".ckpt")
NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.\w+)")


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
        self.files, expected = find_weight_files(folder)
        self.headers: dict[str, Header] = {}
        for path in self.files:
            for key, header in self._read_headers(path).items():
                if not key.isprintable():
                    raise UserError(f"{path.name} names a tensor {key!r}, with unprintable characters; rename it")
                if key in self.headers:
                    raise UserError(f"{key} is in {self.headers[key].path.name} and in {path.name}; keep one of them")
                self.headers[key] = header
        for key, path in expected.items():
            if key not in self.headers or self.headers[key].path != path:
                raise UserError(f"the index places {key} in {path}, which lacks it; copy or save the checkpoint again")

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


def find_weight_files(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """Returns the weight files, and which tensors an index places in them.

    As in Transformers, safetensors come before `.bin`, and a single file before shards.

    Raises:
        UserError: there are none, or one that an index or the numbering names is missing.
    """
    for stem, suffix in FORMATS:
        if (single := folder / f"{stem}{suffix}").is_file():
            return [require_inside(single)], {}
        if (index := folder / f"{stem}{suffix}.index.json").is_file():
            placed = read_weight_map(index)
            return _require_files(sorted(set(placed.values())), index.name), placed
        found = sorted(path for path in folder.glob(f"*{suffix}") if not path.stem.startswith(NO_WEIGHTS))
        if found:
            return _require_files(_complete_numbering(found), "their numbering"), {}
    others = sorted(path.name for path in folder.glob("*") if path.suffix in OTHER_PICKLES)
    rename = f"; if {others[0]} is a state dict, call it pytorch_model.bin" if others else "; give another folder"
    raise UserError(f"{folder} has no weights (*.safetensors or *.bin){rename}")


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


def _complete_numbering(found: list[Path]) -> list[Path]:
    """The files that should be there if some are called `...-00002-of-00003...`."""
    expected = set(found)
    for path in found:
        if match := NUMBERED.fullmatch(path.name):
            stem, _, count, suffix = match.groups()
            expected |= {path.with_name(f"{stem}-{n:05d}-of-{count}{suffix}") for n in range(1, int(count) + 1)}
    return sorted(expected)


def _require_files(paths: list[Path], said_by: str) -> list[Path]:
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path} is missing, but {said_by} names it; copy it there")
        require_inside(path)
    return paths
