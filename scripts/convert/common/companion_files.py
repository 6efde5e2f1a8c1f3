"""The files of a checkpoint beside weights and configuration: tokenizer, generation configuration, license."""

from collections.abc import Iterator
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedConfig

from ...common.checkpoint_files import COMPANION_PATTERNS, TOKENIZER_PATTERNS, matching_files
from ...common.errors import last_line

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def find_companions(source: Path) -> list[str]:
    """The paths in `source` of the files of tokenizer, processor, generation configuration and license.

    Raises:
        UserError: one is a link to a file elsewhere.
    """
    return matching_files(source, (*TOKENIZER_PATTERNS, *COMPANION_PATTERNS))


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
    if len(tokenizer) > config.vocab_size:
        yield f"the tokenizer has {len(tokenizer)} tokens but the model embeds {config.vocab_size}"
