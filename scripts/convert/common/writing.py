"""Writing a converted checkpoint: weights in shards, configuration, tokenizer."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedConfig

from ...common.checkpoint_files import TOKENIZER_PATTERNS, matching_files
from ...common.errors import last_line
from .arguments import parse_size
from .shards import write_shards
from .tensor_source import TensorSource
from .weight_map import Step, written_shapes

DEFAULT_SHARD = 5 * 10**9
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_weights(
    folder: Path, source: TensorSource, steps: Sequence[Step], dtype: torch.dtype, max_shard_size: str | None
) -> None:
    """Streams the weights into `folder`."""
    sizes = [path.stat().st_size for path in source.files]
    limit = max(sizes) if len(sizes) > 1 else DEFAULT_SHARD
    if max_shard_size is not None:
        limit = parse_size(max_shard_size)
    write_shards(folder, steps, source.read, written_shapes(steps, source.shapes), dtype=dtype, limit=limit)


def write_ours(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> list[str]:
    """Writes our `config.json` with the special tokens of the tokenizer in `folder`; returns warnings."""
    # AutoTokenizer also reads config.json to choose the tokenizer's class, so the file is there before the tokenizer is
    # loaded, and is written again with the special tokens.
    write_transformers_config(folder, config, dtype)
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
    if len(tokenizer) > config.vocab_size:
        yield f"the tokenizer has {len(tokenizer)} tokens but the model embeds {config.vocab_size}"


def write_transformers_config(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Writes the `config.json` of a model that Transformers loads."""
    config.dtype = dtype
    config.save_pretrained(folder)
