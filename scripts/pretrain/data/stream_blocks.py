"""Blocks of a stream in files, which one process writes and others wait for."""

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from ...common.atomic_file import partial_path, put_in_place
from ...common.errors import UserError

# What ended the writing process, if something did.
FAILURE = "failed.json"


@dataclass(frozen=True)
class Block:
    """Consecutive sequences of a stream, and what is needed to read on behind them.

    Attributes:
        tokens: `[N, T]`.
        starts, targets: `[N, T]`, where documents start, and which tokens are targets.
        rest: `[3, R]`, the tokens, starts and targets of what was read but belongs to the next block.
        cursor: where the stream is read on: how often all of it was read before (`pass`), and the `state_dict` of the
            `IterableDataset` (`state`).
    """

    tokens: NDArray[np.int32]
    starts: NDArray[np.bool_]
    targets: NDArray[np.bool_]
    rest: NDArray[np.int32]
    cursor: dict[str, Any]

    def save(self, path: Path) -> None:
        """Writes the block under another name and renames it."""
        partial = partial_path(path)
        arrays = {name: getattr(self, name) for name in ("tokens", "starts", "targets", "rest")}
        metadata = {"cursor": json.dumps(self.cursor), "checksum": str(zlib.crc32(self.tokens.tobytes()))}
        save_file(arrays, partial, metadata)
        put_in_place(partial, path)

    @classmethod
    def load(cls, path: Path) -> "Block":
        """Reads a block.

        Raises:
            UserError: its tokens are not those that were saved.
        """
        with safe_open(path, framework="np") as file:
            metadata = file.metadata()
            arrays = {name: file.get_tensor(name) for name in ("tokens", "starts", "targets", "rest")}
            block = cls(**arrays, cursor=json.loads(metadata["cursor"]))
        if zlib.crc32(block.tokens.tobytes()) != int(metadata["checksum"]):
            raise UserError(f"{path} does not have the contents that were saved; delete {path.parent} to read it anew")
        return block


def block_path(folder: Path, number: int) -> Path:
    """The file of block `number`."""
    return folder / f"{number:08d}.safetensors"


def written_blocks(folder: Path) -> list[int]:
    """The numbers of the blocks that are there, ascending."""
    return sorted(int(path.stem) for path in folder.glob("*.safetensors") if path.stem.isdecimal())


def check_failure(folder: Path) -> None:
    """Reports why the writing process has failed, if it has.

    Raises:
        UserError: it has failed; the message has its error.
    """
    failure = folder / FAILURE
    if failure.exists():
        raise UserError(f"the training data could not be read on: {json.loads(failure.read_text())['error']}")
