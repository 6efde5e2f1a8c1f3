"""Conversion between the official RCMHA family and ours: check everything, write aside, verify, then move in place."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dynattn import RCMHAConfig

from ...common.atomic_folder import check_destination, recover, staged_folder
from ...common.checkpoint_files import read_config
from ...common.errors import UserError
from ..common.companion_files import copy_companions
from ..common.comparison import Verification
from ..common.planning import check_shapes, choose_dtype, in_file_order, meta_model, shapes_of
from ..common.probe import load_config
from ..common.tensor_source import TensorSource
from ..common.weight_map import Step, foreign_shapes, plan_export, plan_import, written_shapes
from ..common.writing import write_json, write_ours, write_weights
from .arguments import RCMHAArguments
from .config import OfficialRCMHAConfig, field_warnings
from .export import export_warnings, to_official
from .layout import rcmha_map
from .reference import OfficialRCMHA
from .verify import verify_segments


@dataclass
class RCMHAConversion:
    """What is to be done, and at the end what was done."""

    source: TensorSource
    official: OfficialRCMHAConfig
    config: RCMHAConfig  # ours
    steps: Sequence[Step]
    dtype: torch.dtype
    warnings: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    verification: Verification | None = None
    effect: float | None = None  # of streaming memory, on the logits

    @property
    def parameters(self) -> tuple[int, int]:
        """Numbers that are read, and numbers that are written."""
        written = written_shapes(self.steps, self.source.shapes)
        return tuple(sum(shape.numel() for shape in shapes.values()) for shapes in (self.source.shapes, written))  # type: ignore[return-value]


def convert_rcmha(arguments: RCMHAArguments) -> RCMHAConversion:
    """Converts one checkpoint folder; the destination appears when everything went well, and else stays as it was.

    Raises:
        UserError: the source is damaged or not convertible, the destination is taken, or the result is wrong.
    """
    source, destination = Path(arguments.source).resolve(), Path(arguments.destination).resolve()
    raw = read_config(source)
    recover(destination)
    check_destination(destination, source, arguments.overwrite)
    conversion = (plan_reverse if arguments.reverse else plan_forward)(arguments, raw, source)
    with staged_folder(destination) as staging:
        write_weights(staging, conversion.source, conversion.steps, conversion.dtype, arguments.max_shard_size)
        copy_companions(source, staging)
        if arguments.reverse:
            write_json(staging, conversion.official.to_json())
        else:
            conversion.warnings.extend(write_ours(staging, conversion.config, conversion.dtype))
        if arguments.verify:
            verify(conversion, staging, reverse=arguments.reverse)
        conversion.sizes = {path.name: path.stat().st_size for path in sorted(staging.iterdir())}
    return conversion


def plan_forward(arguments: RCMHAArguments, raw: dict[str, Any], folder: Path) -> RCMHAConversion:
    """Reads the official format: configuration, names and shapes, but not yet the weights.

    Raises:
        UserError: they do not fit each other, or something would be lost.
    """
    source = TensorSource(folder)
    official = OfficialRCMHAConfig.from_json(raw, source.shapes)
    config = official.to_ours(arguments.memory_type, arguments.max_position_embeddings)
    steps, _ = plan_import(rcmha_map(official, config.num_relative_positions), source.headers)
    model = meta_model(config)
    config.architectures = [type(model).__name__]
    check_shapes(source, foreign_shapes(steps, shapes_of(model)))
    dtype = choose_dtype(arguments.dtype, source, steps)
    return RCMHAConversion(
        source, official, config, in_file_order(steps, source), dtype, list(field_warnings(raw, official))
    )


def plan_reverse(arguments: RCMHAArguments, raw: dict[str, Any], folder: Path) -> RCMHAConversion:
    """Reads our format likewise.

    Raises:
        UserError: they do not fit each other, or the official code cannot run such a model.
    """
    if "kind" in raw and "hidden_size" not in raw:
        raise UserError("config.json is not in our format; leave out --reverse to convert the official one")
    config = load_config(folder)
    if not isinstance(config, RCMHAConfig):
        raise UserError(f"{folder} holds a {config.model_type!r} model, but only rcmha can be converted here")
    official = to_official(config, arguments.official_positions, from_streaming=arguments.from_streaming)
    source = TensorSource(folder)
    steps = plan_export(rcmha_map(official, config.num_relative_positions), source.headers)
    check_shapes(source, shapes_of(meta_model(config)))
    dtype = choose_dtype(arguments.dtype, source, steps)
    return RCMHAConversion(source, official, config, in_file_order(steps, source), dtype, list(export_warnings(config)))


def verify(conversion: RCMHAConversion, staging: Path, *, reverse: bool) -> None:
    """Compares our side of the conversion with the official one, both as they were written."""
    ours, theirs = (conversion.source.folder, TensorSource(staging)) if reverse else (staging, conversion.source)
    official = OfficialRCMHA(conversion.official, lambda key: theirs.read(key).to(conversion.dtype))
    conversion.verification, conversion.effect = verify_segments(ours, conversion.dtype, conversion.config, official)
