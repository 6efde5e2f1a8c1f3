"""Asks which attention of an encoder-decoder gains from composed heads, and how RCMHA's four attention types translate.

    dynattn reproduce seq2seq [--quick] [--workers 2] [--max_seconds 10000]

The arms are small DCBarts with composition in the encoder, in the decoder, in cross-attention, in all or in none of
them, a plain DCBart with as many parameters as the composed one, and RCMHA encoder-decoders of each attention type.
There are two tasks: to copy, reverse, sort or double a sequence, tested also on longer sequences; and to translate
English names of countries, regions and languages to Ukrainian, tested on held-out names. Neither paper trains an
encoder-decoder. Finished runs are not repeated, so an interrupted study resumes where it stopped.
"""

from collections.abc import Sequence

from ...common.arguments import parse_arguments
from ..paired_study.arguments import PairedStudyArguments


def main(argv: Sequence[str]) -> int:
    """Runs what is missing of the study, then writes and prints the results."""
    arguments = parse_arguments(PairedStudyArguments, argv, prog="dynattn reproduce seq2seq", description=__doc__)
    from ..paired_study.job import run_study  # slow to import, so not before the arguments are parsed
    from .study import SEQ2SEQ

    print(run_study(SEQ2SEQ, arguments))
    return 0
