"""Reads both sides of a conversion, and refuses one that would lose information, before any weight is read."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ...common.atomic_file import write_json
from ...common.errors import UserError
from ...common.folder_names import resolve_folder
from ..common.driver import ConversionPlan, convert
from ..common.dropout import warn_of_dropout
from ..common.model_loading import load_config
from ..common.planning import authors_steps, check_import, choose_dtype, in_file_order
from ..common.tensor_source import TensorSource
from ..common.weight_map import plan_import
from ..common.writing import write_ours
from .arguments import OfficialArguments
from .config import OfficialConfig, field_warnings, length_warnings, pattern_warnings
from .export import to_json, to_official
from .layout import official_map
from .merged_copies import stale_copies, static_matrices, trained_statics
from .reference import OfficialModel
from .verify import verify_logits


@dataclass(kw_only=True)
class Conversion(ConversionPlan):
    """A conversion between the official format and ours.

    Args:
        official: the official configuration.
        config: ours.
    """

    arguments: OfficialArguments
    official: OfficialConfig
    config: PreTrainedConfig

    def write_config(self, folder: Path) -> Iterable[str]:
        if not self.arguments.reverse:
            return write_ours(folder, self.config, self.dtype)
        write_json(folder / "config.json", to_json(self.official, self.dtype))
        return ()

    def verify(self, written: Path) -> str:
        ours, theirs = self.our_and_foreign_side(written)
        model = OfficialModel(
            self.official,
            theirs.headers,
            lambda key: theirs.read(key).to(self.dtype),
            window=self.config.sliding_window,
            prefer_merged=self.arguments.prefer_merged,
            keep_static=self.arguments.static == "keep",
        )
        return verify_logits(ours, self.dtype, model)

    def describe_source(self) -> str:
        return (
            f"{self.official.family}, {self.config.num_hidden_layers} layers, {self.config.num_attention_heads} heads, "
            f"{self.source.elements:,} elements"
        )

    def details(self) -> Iterator[tuple[str, str]]:
        if local := self.config.layer_types.count("sliding_attention"):
            window = self.config.sliding_window
            yield "windows", f"{window} keys, itself included, for a token of {local} local layers"


def convert_official(arguments: OfficialArguments) -> Conversion:
    """Converts one checkpoint folder; the destination appears when everything went well, and else stays as it was.

    Raises:
        UserError: the source is damaged or not convertible, the destination is taken, or the result is wrong.
    """
    return convert(arguments, resolve_folder(arguments.source), forward=plan_forward, reverse=plan_reverse)


def plan_forward(arguments: OfficialArguments, raw: dict[str, Any], source: TensorSource) -> Conversion:
    """Reads the official format: configuration, names and redundant tensors, but not yet the weights.

    Raises:
        UserError: they do not fit each other, or something would be lost.
    """
    official = OfficialConfig.from_json(raw, source.headers, arguments.family)
    keep_static = arguments.static == "keep"
    weight_map = official_map(official, prefer_merged=arguments.prefer_merged, keep_static=keep_static)
    steps, dropped = plan_import(weight_map, source.headers)
    config = official.to_ours(local_window(arguments, official), compose_static=keep_static)
    check_import(config, source, steps)
    dtype = choose_dtype(arguments.dtype, source, steps)
    check_static(arguments, source, official)
    warnings = list(field_warnings(raw, official))
    if not arguments.prefer_merged:
        warnings += warn_of_stale_copies(source, official)
    return Conversion(
        arguments=arguments,
        source=source,
        steps=in_file_order(steps, source),
        dtype=dtype,
        dropped=dropped,
        warnings=warnings,
        official=official,
        config=config,
    )


def plan_reverse(arguments: OfficialArguments, raw: dict[str, Any], source: TensorSource) -> Conversion:
    """Reads our format: configuration, names and shapes, but not yet the weights.

    Raises:
        UserError: they do not fit each other, or the official code cannot run such a model.
    """
    if "hidden_size" not in raw:
        raise UserError("config.json is not in our format; leave out --reverse to convert the official one")
    config = load_config(source.folder)
    official = to_official(config)
    steps = authors_steps(source, official_map(official), config)
    return Conversion(
        arguments=arguments,
        source=source,
        steps=in_file_order(steps, source),
        dtype=choose_dtype(arguments.dtype, source, steps),
        warnings=[*pattern_warnings(official), *length_warnings(official), *warn_of_dropout(config)],
        official=official,
        config=config,
    )


def check_static(arguments: OfficialArguments, source: TensorSource, official: OfficialConfig) -> None:
    """Raises UserError where there are static matrices and nobody said what to do, or there are none to keep."""
    if (trained := trained_statics(source, official)) and arguments.static != "drop":
        raise UserError(
            f"{trained[0]} ({len(trained)} such tensors) is neither an identity nor made from pre_proj.w and "
            "post_proj.w, as after training with the official use_sw, and cannot be converted; --static drop loses it"
        )
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
    window = official.window_size
    if window is None:
        if arguments.window is not None or arguments.official_prefill_window:
            raise UserError("config.json has no window_size, so no layer is local; leave out the option about windows")
        return None
    return (arguments.window or window) + arguments.official_prefill_window


def warn_of_stale_copies(source: TensorSource, official: OfficialConfig) -> Iterator[str]:
    """A warning about merged copies of the composition that differ from their parts."""
    if stale := list(stale_copies(source, official)):
        yield (
            f"dw_m or qkw_m differ from dw1, dd and qkw in {len(stale)} layers (by up to {max(stale):.1e}), as after "
            "training with the official PyTorch code; --prefer-merged takes what was trained"
        )
