"""Writing a converted checkpoint: weights in shards, configuration, tokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from ...common import atomic_file
from .arguments import parse_size
from .companion_files import adopt_special_tokens
from .shards import write_shards
from .tensor_source import TensorSource
from .weight_map import Step, written_shapes

DEFAULT_SHARD = 5 * 10**9


def write_weights(
    folder: Path, source: TensorSource, steps: Sequence[Step], dtype: torch.dtype, max_shard_size: str | None
) -> None:
    """Streams the weights into `folder`."""
    sizes = [path.stat().st_size for path in source.files]
    limit = max(sizes) if len(sizes) > 1 else DEFAULT_SHARD
    if max_shard_size is not None:
        limit = parse_size(max_shard_size)
    write_shards(folder, steps, source.read, written_shapes(steps, source.shapes), dtype=dtype, limit=limit)


def write_foreign_config(folder: Path, content: dict[str, Any]) -> None:
    """Writes a `config.json` that is not of Transformers."""
    atomic_file.write_json(folder / "config.json", content)


def write_ours(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> list[str]:
    """Writes our `config.json` with the special tokens of the tokenizer in `folder`; returns warnings."""
    # AutoTokenizer also reads config.json to choose the tokenizer's class, so the file is there before the tokenizer is
    # loaded, and is written again with the special tokens.
    write_transformers_config(folder, config, dtype)
    warnings = list(adopt_special_tokens(config, folder))
    config.save_pretrained(folder)
    return warnings


def write_transformers_config(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Writes the `config.json` of a model that Transformers loads."""
    config.dtype = dtype
    config.save_pretrained(folder)
