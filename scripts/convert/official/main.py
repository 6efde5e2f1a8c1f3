"""Converts an official DCFormer or DCPythia checkpoint into ours, or with --reverse one of ours into theirs.

Run: `dynattn convert official SRC DST [--option value]`
"""

import sys
from collections.abc import Iterator, Sequence

from transformers.utils.logging import disable_progress_bar

from ...common.arguments import parse_arguments
from ..common.arguments import name_folders
from .arguments import OfficialArguments
from .job import Conversion, convert_official


def main(argv: Sequence[str]) -> int:
    """Converts and tells what was read, dropped, written and proved."""
    prog = "dynattn convert official SRC DST"
    argv = name_folders(argv, OfficialArguments)
    arguments = parse_arguments(OfficialArguments, argv, prog=prog, description=__doc__)
    disable_progress_bar()
    conversion = convert_official(arguments)
    for warning in conversion.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print("\n".join(report(conversion, arguments)))
    return 0


def report(conversion: Conversion, arguments: OfficialArguments) -> Iterator[str]:
    """The lines to print."""
    official, config = conversion.official, conversion.config
    numbers = sum(shape.numel() for shape in conversion.source.shapes.values())
    yield (
        f"read        {official.family}, {config.num_hidden_layers} layers, {config.num_attention_heads} heads, "
        f"{numbers:,} numbers in {len(conversion.source.files)} files"
    )
    for reason, keys in conversion.dropped.items():
        yield f"dropped     {len(keys)} tensors: {reason}"
    if local := config.layer_types.count("sliding_attention"):
        yield f"windows     {config.sliding_window} keys, itself included, for a token of {local} local layers"
    for name, size in conversion.sizes.items():
        yield f"{size:>14,}  {name}"
    verification = conversion.verification
    if verification is None:
        yield "verified    no (--no-verify)"
    else:
        yield (
            f"verified    {verification.tokens} tokens: logits differ by {verification.difference:.1e} from the "
            f"official formulas (float32 rounding {verification.noise:.1e}, limit {verification.limit:.1e})"
        )
    yield f"written     {arguments.destination}"
