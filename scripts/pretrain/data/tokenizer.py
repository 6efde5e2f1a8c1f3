"""The tokenizer of a run: a byte-level BPE trained on its data, or a given one."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dynattn.modeling.positions.context_length import context_length

from ...common.errors import UserError, first_line
from ...common.special_tokens import start_token_id

END_OF_TEXT, PADDING, MASK = "<|endoftext|>", "<|padding|>", "<|mask|>"
# The library reserves memory for all entries before it reads a text, and ends the process if there is not enough.
LARGEST_VOCABULARY = 2**22


def train_bpe(batches: Iterable[list[str]], vocab_size: int, *, masks: bool = False) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE with one special token for the start of documents, their end, and padding.

    Args:
        masks: add a mask token, and a separate padding token, for encoders.

    Raises:
        UserError: `vocab_size` cannot hold the 256 bytes and the special tokens, or is far too large.
    """
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), [END_OF_TEXT, *([PADDING, MASK] if masks else [])]
    if vocab_size < (least := len(alphabet) + len(special)):
        raise UserError(f"vocab_size={vocab_size} is too small for a byte-level BPE; give {least} or more")
    if vocab_size > LARGEST_VOCABULARY:
        raise UserError(f"vocab_size={vocab_size} is more than memory is made for; give {LARGEST_VOCABULARY} or less")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(batches, trainer)
    names = {"pad_token": END_OF_TEXT}
    if masks:
        names = {"pad_token": PADDING, "mask_token": MASK, "cls_token": END_OF_TEXT, "sep_token": END_OF_TEXT}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, **names)


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """Loads a tokenizer from a folder or the Hub; a missing padding token becomes the end-of-text token.

    If it has `cls` and `sep` instead of `bos` and `eos`, as encoders have, these start and end documents.

    Raises:
        UserError: it cannot be loaded, or has no end-of-text token.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # missing, unreachable and malformed tokenizers all differ in type
        raise UserError(
            f"cannot load the tokenizer {str(name)!r}: {first_line(error)}; give bpe, a folder or a Hub name"
        ) from error
    if tokenizer.eos_token_id is None and tokenizer.sep_token_id is not None:
        tokenizer.eos_token = tokenizer.sep_token
        tokenizer.bos_token = tokenizer.bos_token or tokenizer.cls_token
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer {str(name)!r} has no eos_token, which must end each document; add one and save it"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def save_tokenizer(
    tokenizer: PreTrainedTokenizerBase, folder: Path, config: PreTrainedConfig, sequence_length: int
) -> None:
    """Writes the tokenizer of a model, which truncates texts at the last position, or else at the trained length."""
    tokenizer.model_max_length = context_length(config) or sequence_length
    tokenizer.save_pretrained(folder)


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of everything that decides how text becomes tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else ""
    content = [sorted(tokenizer.get_vocab().items()), rules, tokenizer.eos_token_id, start_token_id(tokenizer)]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
