"""Reading both sides of a conversion, and refusing one that would lose something, before any weight is touched."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from ...common.errors import UserError, last_line
from ..common.comparison import Verification
from ..common.planning import check_shapes, choose_dtype, in_file_order, meta_model, shapes_of
from ..common.tensor_source import TensorSource
from ..common.weight_map import Step, foreign_shapes, plan_export, plan_import
from .arguments import OfficialArguments
from .config import OfficialConfig, field_warnings, pattern_warnings
from .export import to_official
from .layout import official_map
from .merged_copies import stale_copies, static_matrices


@dataclass
class Conversion:
    """What is to be done, and at the end what was done."""

    source: TensorSource
    official: OfficialConfig
    config: PreTrainedConfig  # ours
    steps: Sequence[Step]
    dtype: torch.dtype
    dropped: dict[str, list[str]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    verification: Verification | None = None


def plan_forward(arguments: OfficialArguments, raw: dict[str, Any], folder: Path) -> Conversion:
    """Reads the official format: configuration, names and redundant tensors, but not yet the weights.

    Raises:
        UserError: they do not fit each other, or something would be lost.
    """
    source = TensorSource(folder)
    official = OfficialConfig.from_json(raw, source.headers, arguments.family)
    keep_static = arguments.static == "keep"
    weight_map = official_map(official, prefer_merged=arguments.prefer_merged, keep_static=keep_static)
    steps, dropped = plan_import(weight_map, source.headers)
    config = official.to_ours(local_window(arguments, official), compose_static=keep_static)
    model = meta_model(config)
    config.architectures = [type(model).__name__]
    check_shapes(source, foreign_shapes(steps, shapes_of(model)))
    check_static(arguments, source, official)
    warnings = list(field_warnings(raw, official))
    if not arguments.prefer_merged:
        warnings += warn_of_stale_copies(source, official)
    steps, dtype = in_file_order(steps, source), choose_dtype(arguments.dtype, source, steps)
    return Conversion(source, official, config, steps, dtype, dropped, warnings)


def plan_reverse(arguments: OfficialArguments, raw: dict[str, Any], folder: Path) -> Conversion:
    """Reads our format likewise.

    Raises:
        UserError: they do not fit each other, or the official code cannot run such a model.
    """
    if "hidden_size" not in raw:
        raise UserError("config.json is not in our format; leave out --reverse to convert the official one")
    try:
        config = AutoConfig.from_pretrained(folder)
    except (StrictDataclassError, ValueError, TypeError, OSError) as error:
        raise UserError(f"{folder / 'config.json'} is not valid: {last_line(error)}") from error
    official = to_official(config)
    source = TensorSource(folder)
    steps = in_file_order(plan_export(official_map(official), source.headers), source)
    check_shapes(source, shapes_of(meta_model(config)))
    dtype = choose_dtype(arguments.dtype, source, steps)
    return Conversion(source, official, config, steps, dtype, warnings=list(pattern_warnings(official)))


def check_static(arguments: OfficialArguments, source: TensorSource, official: OfficialConfig) -> None:
    """Raises UserError where there are static matrices and nobody said what to do, or there are none to keep."""
    mixing, placeholders = static_matrices(source, official)
    if not mixing and arguments.static == "keep":
        raise UserError("--static keep, but the weights have no static matrix other than the identity; leave it out")
    if mixing and arguments.static == "refuse":
        raise UserError(
            f"{mixing[0]} ({len(mixing)} such tensors) is no identity, so a static mixing of heads would be lost; "
            "--static keep adds it, as the official trainer does, --static drop loses it, as official inference does"
        )
    if mixing and placeholders and arguments.static == "keep":
        raise UserError(f"{mixing[0]} mixes heads but {placeholders[0]} is an identity; all layers must have either")


def local_window(arguments: OfficialArguments, official: OfficialConfig) -> int | None:
    """Keys that our local layers see, itself included.

    Raises:
        UserError: a window is asked for but no layer is local.
    """
    window = official.local_window
    if window is None:
        if arguments.window is not None or arguments.official_prefill_window:
            raise UserError("config.json has no window_size, so no layer is local; leave out the option about windows")
        return None
    return (arguments.window or window) + arguments.official_prefill_window


def warn_of_stale_copies(source: TensorSource, official: OfficialConfig) -> Iterator[str]:
    """What to tell about merged copies of the composition that differ from their parts."""
    if stale := list(stale_copies(source, official)):
        largest = max(difference for _, difference in stale)
        yield (
            f"dw_m or qkw_m differ from dw1, dd and qkw in {len(stale)} layers (by up to {largest:.1e}), as after "
            "training with the official PyTorch code; --prefer-merged takes what was trained"
        )
