"""Which special tokens stand around a document."""

from transformers import PreTrainedTokenizerBase


def start_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that stands before each document: the tokenizer's `bos`, or its `eos` if it has no `bos`."""
    return tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
