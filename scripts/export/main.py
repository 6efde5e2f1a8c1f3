"""Writes a checkpoint as prefill and decoding graphs for another runtime, and proves that it generates the same tokens.

Run: `dynattn export torch|onnx|openvino|executorch MODEL DST [--option value]`
"""

from collections.abc import Sequence

from ..common.arguments import parse_arguments
from .arguments import ExportArguments


def main(argv: Sequence[str]) -> int:
    """Exports, and prints what was written and how it was verified."""
    arguments = parse_arguments(
        ExportArguments, argv, words=3, prog="dynattn export FORMAT MODEL DST", description=__doc__
    )
    # This imports torch and Transformers, which help and a mistyped option need not wait for.
    from .job import export_checkpoint

    print("\n".join(export_checkpoint(arguments)))
    return 0
