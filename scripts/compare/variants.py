"""The variants of a comparison: the arguments of each, read from its file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.arguments import YAML_ENDINGS, given_options, parse_arguments
from ..common.errors import UserError
from ..common.option_values import parse_mapping
from ..pretrain.arguments import PretrainArguments
from ..pretrain.main import find_shipped

# Arguments that all variants must have in common, because losses on other data or tokens cannot be compared. A streamed
# data set holds out other documents than one that is read whole. The length of sequences, whether documents are
# kept apart, and carried memory decide from how much of a held-out text a token is predicted.
SAME = (
    *("objective", "dataset", "mixture", "dataset_config", "train_split", "validation_split", "validation_dataset"),
    *("validation_share", "text_column", "chat_column", "chat_template", "tokenizer", "vocab_size"),
    *("streaming", "sequence_length", "mask_documents", "carry_memory"),
)
# A comparison sets the first two for each run, and decides about the others itself.
ITS_OWN = ("output", "seed", "resume", "overwrite", "dry_run")


@dataclass(frozen=True)
class Variant:
    """One way to train: its name, and those arguments of `dynattn pretrain` that are not the defaults."""

    name: str
    options: Mapping[str, Any]


def read_variants(files: Sequence[str], common: dict[str, Any] | str | None) -> list[Variant]:
    """Reads the files; `common` holds arguments that replace those of every file.

    Raises:
        UserError: a file or `common` has an unknown argument, two variants have the same name, or they read different
            data.
    """
    for_all = parse_mapping("common", common) or {}
    if own := sorted(set(ITS_OWN) & for_all.keys()):
        raise UserError(f"common has {', '.join(own)}, which the comparison decides; leave it out")
    variants = [Variant(Path(file).stem, _options(file, for_all)) for file in files]
    names = [variant.name for variant in variants]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"variants are named after their files, and {repeated} occurs twice; rename a file")
    _check_same_data(variants)
    return variants


def _options(file: str, common: Mapping[str, Any]) -> dict[str, Any]:
    if not file.endswith(YAML_ENDINGS):
        raise UserError(f"variant {file!r} must be a .yaml file of arguments of dynattn pretrain")
    argv = [*find_shipped([file]), "--output", "unused"]
    arguments = parse_arguments(PretrainArguments, argv, prog="dynattn compare", common=common)
    if arguments.sweep is not None:
        raise UserError(f"{file} has sweep={arguments.sweep!r}; a variant is one run for each seed, so leave sweep out")
    if arguments.dry_run:
        raise UserError(
            f"{file} has dry_run, and a comparison trains; leave it out, or plan the run by dynattn pretrain"
        )
    return {name: getattr(arguments, name) for name in given_options(arguments) if name not in ITS_OWN}


def _check_same_data(variants: Sequence[Variant]) -> None:
    baseline, *others = [PretrainArguments(output="unused", **variant.options) for variant in variants]
    for variant, arguments in zip(variants[1:], others, strict=True):
        for name in SAME:
            value, expected = getattr(arguments, name), getattr(baseline, name)
            if value != expected:
                raise UserError(
                    f"{variant.name} has {name}={value!r} and {variants[0].name} {expected!r}; losses on different "
                    "data or tokens do not compare, nor with other contexts; let all variants read the same"
                )
