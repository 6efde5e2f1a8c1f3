"""Sizes and checksums of the files in a folder, to find out later whether they are what was written."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

CHUNK_BYTES = 1 << 24

# The name of each file below the folder, with its size in bytes and its CRC-32.
Checksums = dict[str, Sequence[int]]


def measure_files(folder: Path, files: Iterable[Path]) -> Checksums:
    """The checksums of `files`, all of which lie below `folder`."""
    return {file.relative_to(folder).as_posix(): measure(file) for file in sorted(files)}


def find_damage(folder: Path, checksums: Mapping[str, Sequence[int]]) -> str | None:
    """Says which file below `folder` is missing or has changed since it was measured, or returns None."""
    for name, (size, checksum) in checksums.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
        if measure(file)[1] != checksum:
            return f"{name} does not have the contents that were saved"
    return None


def measure(path: Path) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return path.stat().st_size, checksum
