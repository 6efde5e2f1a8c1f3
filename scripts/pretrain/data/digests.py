"""Documents by their content: what recognizes prepared data, and finds documents that occur twice."""

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
    """Documents by their content; it does not depend on where they are stored.

    Attributes:
        fingerprint: of the documents and their order.
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
    """Tells how many documents occur more than once, in a split or in both."""
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
