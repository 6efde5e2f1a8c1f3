"""Compares the logits of two checkpoints: of any decoder, encoder, encoder-decoder or vision transformer.

Run: `dynattn convert check A B`. Exits with 0 where they are equal up to rounding, with 1 where they differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING

from ..common.arguments import option
from ..common.checkpoint_files import read_config
from ..common.errors import UserError, first_line
from .common.command_line import parse_with_folders

if TYPE_CHECKING:  # only for annotations: they need torch
    from transformers import PreTrainedConfig

    from .common.probe import Comparison, Probe

# Fields that only a `config.json` in the authors' formats has, by the conversion that reads it.
AUTHORS_FIELDS = {"official": {"dim", "n_layer"}, "rcmha": {"kind", "d_model"}}


@dataclass
class CheckArguments:
    """Arguments of one comparison."""

    first: str = field(metadata={"help": "folder, or name on the Hub (A, the first argument)"})
    second: str = field(metadata={"help": "folder, or name on the Hub (B, the second argument)"})
    first_revision: str | None = option(None, "branch, tag or commit of A on the Hub")
    second_revision: str | None = option(None, "branch, tag or commit of B on the Hub")


def main(argv: Sequence[str]) -> int:
    """Compares and returns the exit status."""
    arguments = parse_with_folders(CheckArguments, argv, "dynattn convert check A B", __doc__)
    comparison = compare_checkpoints(arguments)
    print(f"{'equal' if comparison.equal else 'different':<12}{comparison.describe()}")
    if comparison.equal:
        return 0
    print(f"{'effect':<12}{comparison.describe_effect()}")
    return 1


def compare_checkpoints(arguments: CheckArguments) -> "Comparison":
    """Runs both models on one probe.

    Raises:
        UserError: one of them does not load, or is in the authors' format, or they read vocabularies or images of
            different sizes.
    """
    from .common.hub import locate
    from .common.model_loading import load_config, load_for_probe
    from .common.probe import compare_answers

    folders = [locate(arguments.first, arguments.first_revision), locate(arguments.second, arguments.second_revision)]
    for folder in folders:
        refuse_authors_format(folder)
    configs = [load_config(folder).get_text_config() for folder in folders]
    rows, others = (getattr(config, "vocab_size", None) for config in configs)
    if rows != others:
        raise UserError(f"vocabularies of {rows} and {others} tokens cannot be compared")
    probe = probe_for(folders[0], configs[0])
    inputs = probe.make(folders[0], *configs)
    first = probe.ask(load_for_probe(folders[0], probe), inputs)
    try:
        second = probe.ask(load_for_probe(folders[1], probe), inputs)
    except ValueError as error:  # of vision transformers, for images of another size or other channels than theirs
        reason = first_line(error).rstrip(".")
        raise UserError(
            f"{folders[1]} does not read what {folders[0]} does: {reason}; compare models of the same images"
        ) from error
    return compare_answers(first, second)


def refuse_authors_format(folder: Path) -> None:
    """Raises UserError if the checkpoint in `folder` is one that Transformers cannot run before it is converted."""
    raw = read_config(folder)
    for kind, names in AUTHORS_FIELDS.items():
        if names <= raw.keys():
            command = join(["dynattn", "convert", kind, str(folder), "DST"])
            raise UserError(f"{folder} is in the authors' format; convert it first with `{command}`, and compare DST")


def probe_for(folder: Path, config: "PreTrainedConfig") -> "Probe":
    """The probe for the kind of model in `folder`, which its configuration and its class tell."""
    from transformers import MODEL_FOR_MASKED_LM_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from dynattn.modeling.other_models.composed_classes import composed_name

    from .common.decoder_probe import TEXT
    from .common.encoder_probe import ENCODER
    from .common.image_probe import IMAGES
    from .common.translation_probe import TRANSLATION

    if getattr(config, "vocab_size", None) is None:
        return IMAGES
    if config.is_encoder_decoder:
        return TRANSLATION
    # Some encoders may also be run as decoders, so that only the class tells.
    decoder = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    named = read_config(folder).get("architectures")
    is_encoder = decoder is None or (named and not {decoder, composed_name(decoder)} & set(named))
    return ENCODER if type(config) in MODEL_FOR_MASKED_LM_MAPPING and is_encoder else TEXT
