"""Reads both sides of a conversion, and refuses one that would lose information, before any weight is read."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynattn import RCMHAConfig

from ...common.atomic_file import write_json
from ...common.errors import UserError
from ...common.folder_names import resolve_folder
from ..common.driver import ConversionPlan, convert
from ..common.dropout import warn_of_dropout
from ..common.model_loading import load_config
from ..common.planning import authors_steps, check_import, choose_dtype, in_file_order
from ..common.tensor_source import TensorSource, count_elements
from ..common.weight_map import plan_import, written_shapes
from ..common.writing import write_ours
from .arguments import RCMHAArguments
from .config import OfficialRCMHAConfig, field_warnings
from .export import to_official
from .layout import rcmha_map
from .reference import OfficialRCMHA
from .verify import verify_segments


@dataclass(kw_only=True)
class RCMHAConversion(ConversionPlan):
    """A conversion between the official RCMHA family and ours.

    Args:
        official: the official configuration.
        config: ours.
        effect: of streaming memory, by how much it changes the logits; None where memory goes by segments.
    """

    arguments: RCMHAArguments
    official: OfficialRCMHAConfig
    config: RCMHAConfig
    effect: float | None = None

    def write_config(self, folder: Path) -> Iterable[str]:
        if not self.arguments.reverse:
            return write_ours(folder, self.config, self.dtype)
        write_json(folder / "config.json", self.official.to_json())
        return ()

    def verify(self, written: Path) -> str:
        ours, theirs = self.our_and_foreign_side(written)
        official = OfficialRCMHA(self.official, lambda key: theirs.read(key).to(self.dtype))
        outcome, self.effect = verify_segments(ours, self.dtype, self.config, official)
        return outcome

    def describe_source(self) -> str:
        return (
            f"{self.official.kind}, {self.official.n_layers} layers, {self.official.heads} heads, "
            f"memory of {self.official.mem_len} tokens,"
        )

    def details(self) -> Iterator[tuple[str, str]]:
        if self.official.is_relative:
            yield "positions", self._describe_tables()
        after = count_elements(written_shapes(self.steps, self.source.shapes).values())
        yield "parameters", f"{self.source.elements:,} before, {after:,} after"
        if self.config.memory_type == "streaming":
            yield "memory", self._describe_streaming()

    def _describe_tables(self) -> str:
        """How many rows of the position tables are kept, and how many are dropped or written as zeros, in one line."""
        rows, positions = self.config.num_relative_positions, self.official.P
        if self.arguments.reverse:
            return (
                f"in each layer {rows} of {2 * positions} table rows are ours, of distances 0 to {rows - 1}; the "
                f"others are zeros, so memory and segment together should reach no more than {rows} tokens"
            )
        dropped = f"{positions - 1} of future tokens, 1 out of reach"
        if rows < positions:
            by_segments = self.config.memory_type == "segment"
            limit = f"memory and segment together now reach {rows} tokens" if by_segments else "beyond the window"
            dropped += f", {positions - rows} of longer distances ({limit})"
        return (
            f"in each layer {rows} of {2 * positions} table rows are kept, of distances 0 to {rows - 1}; "
            f"{2 * positions - rows} are dropped: {dropped}"
        )

    def _describe_streaming(self) -> str:
        """That streaming memory computes another function, and by how much its logits differ."""
        measured = "" if self.effect is None else f"; on a probe its logits differ by up to {self.effect:.1e}"
        return (
            f"ours is streaming: every token sees {self.config.mem_len} tokens before it, which is not what the "
            f"official model computes{measured}"
        )


def convert_rcmha(arguments: RCMHAArguments) -> RCMHAConversion:
    """Converts one checkpoint folder; the destination appears when everything went well, and else stays as it was.

    Raises:
        UserError: the source is damaged or not convertible, the destination is taken, or the result is wrong.
    """
    return convert(arguments, resolve_folder(arguments.source), forward=plan_forward, reverse=plan_reverse)


def plan_forward(arguments: RCMHAArguments, raw: dict[str, Any], source: TensorSource) -> RCMHAConversion:
    """Reads the official format: configuration, names and shapes, but not yet the weights.

    Raises:
        UserError: they do not fit each other, or something would be lost.
    """
    official = OfficialRCMHAConfig.from_json(raw, source.shapes)
    config = official.to_ours(arguments.memory_type, arguments.max_position_embeddings)
    steps, dropped = plan_import(rcmha_map(official, config.num_relative_positions), source.headers)
    check_import(config, source, steps)
    return RCMHAConversion(
        arguments=arguments,
        source=source,
        steps=in_file_order(steps, source),
        dtype=choose_dtype(arguments.dtype, source, steps),
        dropped=dropped,
        warnings=list(field_warnings(raw, official)),
        official=official,
        config=config,
    )


def plan_reverse(arguments: RCMHAArguments, raw: dict[str, Any], source: TensorSource) -> RCMHAConversion:
    """Reads our format: configuration, names and shapes, but not yet the weights.

    Raises:
        UserError: they do not fit each other, or the official code cannot run such a model.
    """
    if "kind" in raw and "hidden_size" not in raw:
        raise UserError("config.json is not in our format; leave out --reverse to convert the official one")
    config = load_config(source.folder)
    if not isinstance(config, RCMHAConfig):
        raise UserError(f"{source.folder} holds a {config.model_type!r} model, but only rcmha can be converted here")
    official = to_official(config, arguments.official_positions, from_streaming=arguments.from_streaming)
    steps = authors_steps(source, rcmha_map(official, config.num_relative_positions), config)
    return RCMHAConversion(
        arguments=arguments,
        source=source,
        steps=in_file_order(steps, source),
        dtype=choose_dtype(arguments.dtype, source, steps),
        warnings=list(warn_of_dropout(config)),
        official=official,
        config=config,
    )
