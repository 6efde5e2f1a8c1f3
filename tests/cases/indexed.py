"""Memory maps in Megatron's published format."""

import struct
from pathlib import Path
from typing import Any

import numpy as np

# The numbers of data types in the index.
CODES = {np.uint8: 1, np.int8: 2, np.int16: 3, np.int32: 4, np.int64: 5, np.uint16: 8}


def write_indexed(path: Path, sequences: list[list[int]], dtype: Any = np.uint16, documents: Any = None) -> Path:
    """`path.idx` and `path.bin` as GPT-NeoX's MMapIndexedDataset writes them; each sequence is a document."""
    sizes = np.array([len(one) for one in sequences], dtype=np.int32)
    pointers = (np.cumsum(sizes, dtype=np.int64) - sizes) * np.dtype(dtype).itemsize
    boundaries = np.arange(len(sizes) + 1, dtype=np.int64) if documents is None else np.array(documents, dtype=np.int64)
    header = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[dtype])
    counts = struct.pack("<Q", len(sizes)) + struct.pack("<Q", len(boundaries))
    path.with_suffix(".idx").write_bytes(header + counts + sizes.tobytes() + pointers.tobytes() + boundaries.tobytes())
    path.with_suffix(".bin").write_bytes(np.concatenate([np.array(one, dtype=dtype) for one in sequences]).tobytes())
    return path.with_suffix(".idx")
