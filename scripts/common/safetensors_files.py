"""Opening safetensors files that may be damaged."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from .errors import UserError, first_line


class StoredTensor(NamedTuple):
    """What the header of a file says of a tensor; `dtype` as safetensors spells it, such as "BF16"."""

    dtype: str
    shape: tuple[int, ...]


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
