"""Finding the weight files of a checkpoint folder, whatever their format, and checking that they are complete."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from .checkpoint_files import read_weight_map, require_inside
from .errors import UserError

# How the names of weight files begin and end, the preferred ones first.
FORMATS = (("model", ".safetensors"), ("pytorch_model", ".bin"))
NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state")
# Suffixes under which others store what is read here as `.bin`.
OTHER_PICKLES = (".pth", ".pt", ".ckpt")
NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.\w+)")


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
