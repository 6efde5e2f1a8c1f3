"""Warns of documents that occur more than once, such as validation documents in the training data."""

import logging
from collections.abc import Mapping

import numpy as np

from .digests import Digest

logger = logging.getLogger(__name__)


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
