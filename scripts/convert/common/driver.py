"""The sequence of steps of every conversion: check everything, write to a temporary folder, verify, then move it.

A walkthrough in CONTRIBUTING.md says how to add a kind of conversion.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...common.atomic_folder import claim_destination, staged_folder
from ...common.checkpoint_files import (
    COMPANION_PATTERNS,
    TOKENIZER_PATTERNS,
    check_sizes,
    copy_files,
    file_sizes,
    matching_files,
    read_config,
)
from ...common.folder_names import resolve_destination
from .arguments import ConversionArguments
from .planning import choose_dtype
from .shards import write_shards
from .tensor_source import TensorSource
from .weight_map import Step


@dataclass(kw_only=True)
class ConversionPlan(ABC):
    """What a conversion will do, decided before any weight is read; after the conversion also what it did.

    Each kind of conversion subclasses it, adds the configurations that it needs, and implements the methods below.

    Args:
        arguments: what the user asked for.
        source: the weights to read.
        steps: the tensors that are read together and what is written from them, in the order of reading.
        dtype: of all weights that are written.
        dropped: names of tensors that are not written, by reason.
        warnings: what the user should know.
        sizes: bytes of each file that was written; the driver fills it in.
        checked: what `verify` found; the driver fills it in.
    """

    arguments: ConversionArguments
    source: TensorSource
    steps: Sequence[Step]
    dtype: torch.dtype
    dropped: dict[str, list[str]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    checked: str = "no (--no-verify)"

    @abstractmethod
    def write_config(self, folder: Path) -> Iterable[str]:
        """Writes `config.json` beside the tokenizer, if there is one; returns further warnings."""

    @abstractmethod
    def verify(self, written: Path) -> str:
        """Compares logits of the source and of the folder `written`, and returns what the report says of it.

        Raises:
            UserError: they differ by more than rounding.
        """

    @abstractmethod
    def describe_source(self) -> str:
        """What kind of model was read."""

    def details(self) -> Iterator[tuple[str, str]]:
        """Further lines of the report, about what was read: a word and the text."""
        yield from ()

    def effects(self) -> Iterator[tuple[str, str]]:
        """Further lines of the report, about what was verified: a word and the text."""
        yield from ()

    def describe_result(self) -> str:
        """Where the result is."""
        return self.arguments.destination

    def describe_rounding(self) -> str:
        """That the source was rounded before the comparison, if what is written is narrower than what was read."""
        if torch.promote_types(choose_dtype("auto", self.source, self.steps), self.dtype) == self.dtype:
            return ""
        return f", both with weights rounded to {str(self.dtype).removeprefix('torch.')}"

    def report(self) -> Iterator[str]:
        """The lines to print after the conversion."""
        yield _line("read", f"{self.describe_source()} in {len(self.source.files)} files")
        for reason, keys in self.dropped.items():
            yield _line("dropped", f"{len(keys)} tensors: {reason}")
        for word, text in self.details():
            yield _line(word, text)
        for name, size in self.sizes.items():
            yield f"{size:>14,}  {name}"
        yield _line("verified", self.checked)
        for word, text in self.effects():
            yield _line(word, text)
        yield _line("written", self.describe_result())

    def our_and_foreign_side(self, written: Path) -> tuple[Path, TensorSource]:
        """The folder in our format and the weights in the foreign one, whichever of the two was written."""
        if self.arguments.reverse:
            return self.source.folder, TensorSource(written)
        return written, self.source


Arguments = TypeVar("Arguments", bound=ConversionArguments)
Plan = TypeVar("Plan", bound=ConversionPlan)
Planner = Callable[[Arguments, dict[str, Any], TensorSource], Plan]


def convert(
    arguments: Arguments, source: Path, *, forward: Planner[Arguments, Plan], reverse: Planner[Arguments, Plan]
) -> Plan:
    """Converts one checkpoint folder; the destination appears when everything went well, and else stays as it was.

    Args:
        arguments: what the user asked for.
        source: the folder to read.
        forward: plans a conversion to our format, from the arguments, the content of `config.json` and the weights.
        reverse: plans a conversion from our format likewise.

    Raises:
        UserError: the source is damaged or not convertible, the destination is taken, or the result is wrong.
    """
    destination = resolve_destination(arguments.destination)
    raw = read_config(source)
    check_free = claim_destination(destination, source, arguments.overwrite)
    companions = matching_files(source, (*TOKENIZER_PATTERNS, *COMPANION_PATTERNS))
    weights = TensorSource(source)
    check_sizes(raw, weights.shapes)
    plan = (reverse if arguments.reverse else forward)(arguments, raw, weights)
    with staged_folder(destination, check_free) as staging:
        write_shards(staging, plan.source, plan.steps, plan.dtype, arguments.max_shard_size)
        copy_files(companions, source, staging)
        plan.warnings.extend(plan.write_config(staging))
        if arguments.verify:
            plan.checked = plan.verify(staging) + plan.describe_rounding()
        plan.sizes = file_sizes(staging)
    return plan


def _line(word: str, text: str) -> str:
    return f"{word:<12}{text}"
