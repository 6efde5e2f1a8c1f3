"""Writing the configuration of a model of ours, with what its tokenizer tells."""

from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedConfig

from ...common.checkpoint_files import TOKENIZER_PATTERNS, matching_files
from ...common.checkpoint_loading import highest_id
from ...common.errors import last_line

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_ours(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> list[str]:
    """Writes our `config.json` with the special tokens of the tokenizer in `folder`; returns warnings."""
    # AutoTokenizer also reads config.json to choose the tokenizer's class, so the file is there before the tokenizer is
    # loaded, and is written again with the special tokens.
    config.dtype = dtype
    config.save_pretrained(folder)
    warnings = list(adopt_special_tokens(config, folder))
    config.save_pretrained(folder)
    return warnings


def adopt_special_tokens(config: PreTrainedConfig, folder: Path) -> Iterator[str]:
    """Sets the special tokens that `config` lacks from the tokenizer in `folder`; yields warnings."""
    if not matching_files(folder, TOKENIZER_PATTERNS):
        yield "there is no tokenizer to copy"
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception for a damaged file
        yield f"the tokenizer was copied but does not load: {last_line(error)}"
        return
    for name in SPECIAL_TOKENS:
        if getattr(config, name) is None:
            setattr(config, name, getattr(tokenizer, name))
    if (highest := highest_id(tokenizer)) >= config.vocab_size:
        yield f"the tokenizer has ids up to {highest} but the model embeds {config.vocab_size}"
