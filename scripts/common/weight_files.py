"""The weight files of a checkpoint folder: finding them, opening those that may be damaged, and what they must hold."""

import os
import re
import reprlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from .checkpoint_files import read_foreign_json, require_inside
from .errors import UserError, first_line

# The file with all weights, or the one that says in which file each of them is.
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
# How the names of weight files begin and end, the preferred ones first.
FORMATS = (("model", ".safetensors"), ("pytorch_model", ".bin"))
NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state")
# Suffixes under which others store what is read here as `.bin`.
OTHER_PICKLES = (".pth", ".pt", ".ckpt")
NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.\w+)")
# Bytes that file systems allow in the name of a file.
LONGEST_FILE_NAME = 255


class StoredTensor(NamedTuple):
    """What the header of a file says of a tensor; `dtype` as safetensors spells it, such as "BF16"."""

    dtype: str
    shape: tuple[int, ...]


def find_weight_files(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """Returns the weight files, and which tensors an index places in them.

    As in Transformers, safetensors come before `.bin`, and a single file before shards.

    Raises:
        UserError: there are none, or one that an index or the numbering names is missing or a link to elsewhere.
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


def read_weight_map(index: Path) -> dict[str, Path]:
    """The file in which an index of shards places each tensor; the files need not exist.

    Raises:
        UserError: it is no index, or names something else than files in its folder.
    """
    content = read_foreign_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise UserError(f"{index} is no index of shards; copy or save the checkpoint again")
    if not weight_map:
        raise UserError(f"{index} names no weights; copy or save the checkpoint again")
    return {key: _file_of_index(index, name) for key, name in weight_map.items()}


def _file_of_index(index: Path, name: object) -> Path:
    """The weight file `name` that an index lists, which must be a file in its folder, and no link to one elsewhere."""
    is_name = isinstance(name, str) and name.isprintable() and Path(name).name == name and bool(name.strip("."))
    if not is_name or len(os.fsencode(str(name))) > LONGEST_FILE_NAME:
        raise UserError(
            f"{index} names the weight file {reprlib.repr(name)}, which is no file name in that folder; "
            "copy or save the checkpoint again"
        )
    return require_inside(index.with_name(str(name)))


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """The handle of a file, whose tensors are read one by one.

    Raises:
        UserError: the file is damaged or cannot be read, now or in the block.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        size = f"{path.stat().st_size:,} bytes" if path.is_file() else "gone"
        raise UserError(
            f"{path} ({size}) is truncated or no safetensors file: {first_line(error)}; copy or save it again"
        ) from error


def read_header(path: Path) -> dict[str, StoredTensor]:
    """What a file says of its tensors, by name; raises UserError as `open_safetensors`."""
    with open_safetensors(path) as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  the handle is no mapping
        return {key: StoredTensor(part.get_dtype(), tuple(part.get_shape())) for key, part in slices.items()}


def check_places(found: Mapping[Path, Collection[str]], placed: Mapping[str, Path]) -> None:
    """Checks that every tensor is in exactly one file, and in the one that the index names.

    Args:
        found: the names of the tensors in each file.
        placed: the file of each tensor according to the index; empty if there is none.

    Raises:
        UserError: a file lacks a tensor, two files have the same one, or a name has unprintable characters.
    """
    for key, path in placed.items():
        if key not in found[path]:
            raise UserError(f"the index places {key} in {path}, which lacks it; copy or save the checkpoint again")
    places: dict[str, Path] = {}
    for path, keys in found.items():
        for key in keys:
            if not key.isprintable():
                raise UserError(f"{path.name} names a tensor {key!r}, with unprintable characters; rename it")
            if key in places:
                raise UserError(f"{key} is in {places[key].name} and in {path.name}; keep one of them")
            places[key] = path
