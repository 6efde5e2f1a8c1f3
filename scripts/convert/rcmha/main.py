"""Converts an official RCMHA, RMHA, MDHA or MHA checkpoint into ours, or with --reverse one of ours into theirs.

SRC holds the official state dict and a config.json with kind, heads, d_model, d_ff, n_layers, vocab and mem_len, and
where they differ from the official code's also P (4096) and activation (relu).

Run: `dynattn convert rcmha SRC DST [--option value]`
"""

import sys
from collections.abc import Iterator, Sequence

from transformers.utils.logging import disable_progress_bar

from ...common.arguments import parse_arguments
from ..common.arguments import name_folders
from ..common.comparison import Verification
from .arguments import RCMHAArguments
from .job import RCMHAConversion, convert_rcmha


def main(argv: Sequence[str]) -> int:
    """Converts and tells what was read, dropped, written and proved."""
    prog = "dynattn convert rcmha SRC DST"
    argv = name_folders(argv, RCMHAArguments)
    arguments = parse_arguments(RCMHAArguments, argv, prog=prog, description=__doc__)
    disable_progress_bar()
    conversion = convert_rcmha(arguments)
    for warning in conversion.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print("\n".join(report(conversion, arguments)))
    return 0


def report(conversion: RCMHAConversion, arguments: RCMHAArguments) -> Iterator[str]:
    """The lines to print."""
    official, (before, after) = conversion.official, conversion.parameters
    yield (
        f"read        {official.kind}, {official.n_layers} layers, {official.heads} heads, "
        f"memory of {official.mem_len} tokens, in {len(conversion.source.files)} files"
    )
    if official.is_relative:
        yield f"positions   {describe_tables(conversion, reverse=arguments.reverse)}"
    yield f"parameters  {before:,} before, {after:,} after"
    if conversion.config.memory_type == "streaming":
        yield f"memory      {describe_streaming(conversion)}"
    for name, size in conversion.sizes.items():
        yield f"{size:>14,}  {name}"
    proof = conversion.verification
    yield "verified    no (--no-verify)" if proof is None else f"verified    {describe(proof)}"
    yield f"written     {arguments.destination}"


def describe_tables(conversion: RCMHAConversion, *, reverse: bool) -> str:
    """What became of the rows of the position tables."""
    rows, positions = conversion.config.num_relative_positions, conversion.official.P
    if reverse:
        return (
            f"in each layer {rows} of {2 * positions} table rows are ours, of distances 0 to {rows - 1}; the others "
            f"are zeros, so memory and segment together should reach no more than {rows} tokens"
        )
    dropped = f"{positions - 1} of future tokens, 1 out of reach"
    if rows < positions:
        by_segments = conversion.config.memory_type == "segment"
        limit = f"memory and segment together now reach {rows} tokens" if by_segments else "beyond the window"
        dropped += f", {positions - rows} of longer distances ({limit})"
    return (
        f"in each layer {rows} of {2 * positions} table rows are kept, of distances 0 to {rows - 1}; "
        f"{2 * positions - rows} are dropped: {dropped}"
    )


def describe_streaming(conversion: RCMHAConversion) -> str:
    """That streaming memory is another function, and by how much."""
    measured = "" if conversion.effect is None else f"; on a probe its logits differ by up to {conversion.effect:.1e}"
    return (
        f"ours is streaming: every token sees {conversion.config.mem_len} tokens before it, which is not what the "
        f"official model computes{measured}"
    )


def describe(proof: Verification) -> str:
    """What the proof says."""
    return (
        f"{proof.tokens} tokens in segments with memory: logits differ by {proof.difference:.1e} from the official "
        f"formulas (float32 rounding {proof.noise:.1e}, limit {proof.limit:.1e})"
    )
