"""Which special tokens stand around a document, and which stand for what a tokenizer cannot express."""

import logging

import numpy as np
from numpy.typing import ArrayLike
from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def start_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that stands before each document: the tokenizer's `bos`, or its `eos` if it has no `bos`."""
    return tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id


def warn_of_unknown(tokenizer: PreTrainedTokenizerBase, scored: ArrayLike) -> None:
    """Warns if some of the tokens `scored` `[N]` stand for whatever is unknown, so that they do not tell the text.

    Where one token has both tasks, as GPT-2's, it only ends documents: its bytes are all known.
    """
    if tokenizer.unk_token_id in (None, tokenizer.eos_token_id):
        return
    are_unknown = np.asarray(scored) == tokenizer.unk_token_id
    if are_unknown.any():
        message = "%d of %d tokens are %s: what they stand for is not scored, and bits per byte are too low"
        logger.warning(message, are_unknown.sum(), are_unknown.size, tokenizer.unk_token)
