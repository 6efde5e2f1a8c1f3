"""The names of files with tokens that exist already; nothing here imports PyTorch, so that arguments can ask."""

from pathlib import Path

INDEX, DATA = ".idx", ".bin"


def is_indexed(source: str) -> bool:
    """Whether `source` names a file in the format of Megatron, see `indexed`."""
    return Path(source).suffix in (INDEX, DATA)
