"""Hashes of documents: they show whether prepared data is of the same documents, and which documents occur twice."""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from .documents import iterate_texts

logger = logging.getLogger(__name__)


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


def warn_of_copies(train: Mapping[str, Digest], validation: Digest) -> None:
    """Warns of documents that occur more than once, in a split or in both."""
    for name, split in {**train, "validation": validation}.items():
        if copies := len(split.documents) - len(np.unique(split.documents)):
            logger.warning(
                "%d of the %d %s documents are copies of others; was a file given twice?",
                copies,
                len(split.documents),
                "training" if name == "train" else name,
            )
    every = np.concatenate([split.documents for split in train.values()])
    if shared := int(np.isin(validation.documents, every).sum()):
        logger.warning(
            "%d of the %d validation documents are also training documents, so the validation loss is too low; remove "
            "the copies, or name other validation data",
            shared,
            len(validation.documents),
        )
