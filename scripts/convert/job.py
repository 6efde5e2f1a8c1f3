"""Conversion between the official format and ours: check everything, write aside, verify, then move in place."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..checkpoint_folder import read_config
from ..staging import check_destination, recover, staged_folder
from .arguments import OfficialArguments, parse_size
from .companions import adopt_special_tokens, copy_companions
from .official_export import to_json
from .plan import Conversion, plan_forward, plan_reverse
from .reference import OfficialModel
from .shards import write_shards
from .source import TensorSource
from .verify import Verification, verify_logits
from .weight_map import Step, written_shapes

DEFAULT_SHARD = 5 * 10**9


def convert_official(arguments: OfficialArguments) -> Conversion:
    """Converts one checkpoint folder; the destination appears when everything went well, and else stays as it was.

    Raises:
        UserError: the source is damaged or not convertible, the destination is taken, or the result is wrong.
    """
    source, destination = Path(arguments.source).resolve(), Path(arguments.destination).resolve()
    raw = read_config(source)
    recover(destination)
    check_destination(destination, source, arguments.overwrite)
    conversion = plan_reverse(arguments, raw, source) if arguments.reverse else plan_forward(arguments, raw, source)
    with staged_folder(destination) as staging:
        write_weights(staging, conversion.source, conversion.steps, conversion.dtype, arguments.max_shard_size)
        write_config(conversion, staging, arguments)
        if arguments.verify:
            conversion.verification = verify(conversion, staging, arguments)
        conversion.sizes = {path.name: path.stat().st_size for path in sorted(staging.iterdir())}
    return conversion


def write_weights(
    folder: Path, source: TensorSource, steps: Sequence[Step], dtype: torch.dtype, max_shard_size: str | None
) -> None:
    """Streams the weights into `folder`."""
    sizes = [path.stat().st_size for path in source.files]
    limit = max(sizes) if len(sizes) > 1 else DEFAULT_SHARD
    if max_shard_size is not None:
        limit = parse_size(max_shard_size)
    write_shards(folder, steps, source.read, written_shapes(steps, source.shapes), dtype=dtype, limit=limit)


def write_config(conversion: Conversion, folder: Path, arguments: OfficialArguments) -> None:
    """Writes the configuration, and what else belongs to the checkpoint."""
    copy_companions(conversion.source.folder, folder)
    if arguments.reverse:
        write_json(folder, to_json(conversion.official, conversion.dtype))
    else:
        conversion.warnings.extend(write_ours(folder, conversion.config, conversion.dtype))


def write_json(folder: Path, content: dict[str, Any]) -> None:
    """Writes a foreign `config.json`."""
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_ours(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> list[str]:
    """Writes our `config.json` beside a tokenizer, if there is one; returns what the user should know."""
    config.dtype = dtype
    config.save_pretrained(folder)
    warnings = list(adopt_special_tokens(config, folder))
    config.save_pretrained(folder)
    return warnings


def verify(conversion: Conversion, staging: Path, arguments: OfficialArguments) -> Verification:
    """Compares our side of the conversion with the official one, both as they were written."""
    folder, official = staging, conversion.source
    if arguments.reverse:
        folder, official = conversion.source.folder, TensorSource(staging)
    model = OfficialModel(
        conversion.official,
        official.headers,
        lambda key: official.read(key).to(conversion.dtype),
        window=conversion.config.sliding_window,
        prefer_merged=arguments.prefer_merged,
        keep_static=arguments.static == "keep",
    )
    return verify_logits(folder, conversion.dtype, model)
