"""Hashes of documents: they show whether prepared data is of the same documents, and which documents occur twice."""

import hashlib
from dataclasses import dataclass

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from .documents import iterate_texts


@dataclass(frozen=True)
class Digest:
    """Hashes of the content of documents, whose storage does not matter.

    Attributes:
        fingerprint: a hash of all documents in their order.
        documents: `[N]` a hash of each document.
    """

    fingerprint: str
    documents: NDArray[np.uint64]


def digest(dataset: Dataset) -> Digest:
    """Reads all documents once."""
    whole = hashlib.blake2b(digest_size=16)
    hashes = bytearray()
    for texts in iterate_texts(dataset):
        for text in texts:
            encoded = text.encode("utf-8", "surrogatepass")
            whole.update(len(encoded).to_bytes(8, "little"))
            whole.update(encoded)
            hashes += hashlib.blake2b(encoded, digest_size=8).digest()
    return Digest(whole.hexdigest(), np.frombuffer(hashes, dtype=np.uint64))
